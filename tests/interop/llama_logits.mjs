// SPDX-License-Identifier: Apache-2.0
// node llama_logits.mjs NODE_MODULES MODEL.gguf TOKEN,TOKEN,...
// prints llama.cpp's logits after each token, as JSON.
import {readFileSync} from "node:fs";
import {join, resolve} from "node:path";
import {pathToFileURL} from "node:url";

const [modules, modelPath, list] = process.argv.slice(2);
const tokens = list.split(",").map(Number);

// By path: an import by name would look beside this script, where nothing is installed.
const folder = join(resolve(modules), "node-llama-cpp");
const {version, main} = JSON.parse(readFileSync(join(folder, "package.json"), "utf8"));
const {getLlama} = await import(pathToFileURL(join(folder, main)).href);

const llama = await getLlama({gpu: false, build: "never", skipDownload: true, logLevel: "error"});
const model = await llama.loadModel({modelPath});
// llama.cpp would round keys and values to F16.
const context = await model.createContext({
    contextSize: 256,
    flashAttention: false,
    experimentalKvCacheKeyType: "F32",
    experimentalKvCacheValueType: "F32"
});
const results = await context.getSequence().controlledEvaluate(
    tokens.map((token) => [token, {generateNext: {logits: true}}])
);
const logits = results.map(({next}) => {
    const row = [];
    for (const [token, logit] of next.logits) row[token] = logit;
    return row;
});
const release = llama.llamaCppRelease.release;
await llama.dispose();
process.stdout.write(JSON.stringify({version, release, logits}) + "\n");
