#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes a VHA checkpoint of the paper's 1.7B shape with random weights, to measure vha_fold with.

    bench/make_checkpoint.py FOLDER                 # 28 layers in bfloat16, 3.4 GB in 4 shards
    bench/make_checkpoint.py FOLDER --layers 2      # a small one
"""

import argparse
import json
import pathlib
import random
import struct

HIDDEN, HEAD_DIM, PHYSICAL_HEADS, KV_HEADS, RANK = 2048, 128, 8, 2, 4
QUERY_HEADS = PHYSICAL_HEADS * KV_HEADS
INTERMEDIATE, VOCABULARY = 6144, 151936
LAYER = {
    "self_attn.q_proj.weight": [PHYSICAL_HEADS * HEAD_DIM, HIDDEN],
    "self_attn.k_proj.weight": [KV_HEADS * HEAD_DIM, HIDDEN],
    "self_attn.v_proj.weight": [KV_HEADS * HEAD_DIM, HIDDEN],
    "self_attn.o_proj.weight": [HIDDEN, QUERY_HEADS * HEAD_DIM],
    "self_attn.q_norm.weight": [HEAD_DIM],
    "self_attn.k_norm.weight": [HEAD_DIM],
    "self_attn.vha_premix_weight": [KV_HEADS, HEAD_DIM, HEAD_DIM],
    "self_attn.vha_postmix_U": [QUERY_HEADS, RANK],
    "self_attn.vha_postmix_V": [QUERY_HEADS, RANK],
    "input_layernorm.weight": [HIDDEN],
    "post_attention_layernorm.weight": [HIDDEN],
    "mlp.gate_proj.weight": [INTERMEDIATE, HIDDEN],
    "mlp.up_proj.weight": [INTERMEDIATE, HIDDEN],
    "mlp.down_proj.weight": [HIDDEN, INTERMEDIATE],
}


def count(shape):
    result = 1
    for extent in shape:
        result *= extent
    return result


def noise(generator, elements=1 << 20):
    """bfloat16 numbers of either sign between 1/128 and 1/32."""
    low = generator.randbytes(elements)
    high = bytes(0x3C | (byte & 0x80) for byte in generator.randbytes(elements))
    return bytes(byte for pair in zip(low, high) for byte in pair)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--shards", type=int, default=4)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True)

    tensors = [("model.embed_tokens.weight", [VOCABULARY, HIDDEN])]
    for layer in range(arguments.layers):
        tensors += [(f"model.layers.{layer}.{name}", shape) for name, shape in LAYER.items()]
    tensors.append(("model.norm.weight", [HIDDEN]))

    total = sum(2 * count(shape) for _, shape in tensors)
    shards, room = [[]], total // arguments.shards + 1
    for name, shape in tensors:
        if room <= 0:
            shards.append([])
            room = total // arguments.shards + 1
        shards[-1].append((name, shape))
        room -= 2 * count(shape)

    numbers = noise(random.Random(1))
    weight_map = {}
    for index, shard in enumerate(shards, 1):
        file_name = f"model-{index:05}-of-{len(shards):05}.safetensors"
        header, offset = {"__metadata__": {"format": "pt"}}, 0
        for name, shape in shard:
            size = 2 * count(shape)
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + size]}
            weight_map[name] = file_name
            offset += size
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with open(arguments.folder / file_name, "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            while offset:
                offset -= file.write(numbers[:min(offset, len(numbers))])
    (arguments.folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1))
    (arguments.folder / "config.json").write_text(json.dumps({
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attn_type": "vha",
        "hidden_size": HIDDEN, "head_dim": HEAD_DIM, "num_attention_heads": PHYSICAL_HEADS,
        "num_key_value_heads": KV_HEADS, "vha_postmix_rank": RANK, "vha_enable_premix": True,
        "vha_enable_postmix": True, "num_hidden_layers": arguments.layers,
        "intermediate_size": INTERMEDIATE, "vocab_size": VOCABULARY, "hidden_act": "silu",
        "rms_norm_eps": 1e-6, "rope_theta": 1000000, "tie_word_embeddings": True,
        "attention_bias": False, "torch_dtype": "bfloat16"}, indent=2))


if __name__ == "__main__":
    main()
