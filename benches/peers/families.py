#!/usr/bin/env python3
"""Compares every model family with Hugging Face's transformers, on small random checkpoints.

    python families.py PACELINE [FAMILY ...]        a table; PACELINE is the built binary
    python families.py --fixtures DIRECTORY [FAMILY ...]    what transformers computes, for crates/exec/tests

For each family: the loss of a batch, the gradient of every tensor (one step of SGD, from the exported
weights), and greedy tokens equal those of transformers; transformers load what is exported and compute the
same logits; writing, reading and writing again gives the same bytes. Weights follow from the names of
tensors, so that fixtures need not hold them. Single precision, one process, no downloads.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

import numpy
import safetensors.torch
import torch
import transformers

SEQ, SAMPLES, SAID = 32, 4, 12
PROMPT = [40, 41, 33, 97, 98]  # "()!ab" as bytes
MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15

# Sizes by their usual names; families that use others translate them.
BASE = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "tie_word_embeddings": False}
GPT = {"vocab_size": 256, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, "bos_token_id": None,
       "eos_token_id": None, "pad_token_id": None, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "router_aux_loss_coef": 0.0}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 12, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12,
          "num_key_value_heads": 4, "n_routed_experts": 8, "n_shared_experts": 2, "first_k_dense_replace": 1,
          "num_experts_per_tok": 2, "moe_intermediate_size": 24}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0}


def rope(kind, **more):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **more}}


FAMILIES = {
    "llama": ("llama", {}),
    "llama-linear": ("llama", rope("linear", factor=2.0)),
    "llama-dynamic": ("llama", rope("dynamic", factor=2.0)),
    "llama-llama3": ("llama", rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                                   original_max_position_embeddings=16)),
    "llama-yarn": ("llama", {"rope_parameters": YARN, "attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {"sliding_window": 7}),
    "qwen2": ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2}),
    "qwen2_moe": ("qwen2_moe", {**MOE, "num_experts": 6, "shared_expert_intermediate_size": 40,
                                "decoder_sparse_step": 2}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3_moe": ("qwen3_moe", {**MOE, "num_experts": 6, "head_dim": 16, "norm_topk_prob": True,
                                "mlp_only_layers": [1]}),
    "qwen3_moe-raw": ("qwen3_moe", {**MOE, "num_experts": 6, "head_dim": 16, "norm_topk_prob": False}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.0}),
    "gemma": ("gemma", {"head_dim": 16, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    "gemma2": ("gemma2", {"head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 20,
                          "tie_word_embeddings": True, "attn_logit_softcapping": 2.0,
                          "final_logit_softcapping": 3.0}),
    "gemma3_text": ("gemma3_text", {"head_dim": 16, "sliding_window": 5, "num_hidden_layers": 7,
                                    "query_pre_attn_scalar": 16, "tie_word_embeddings": True}),
    "phi": ("phi", {"num_key_value_heads": 4}),
    "phi3": ("phi3", {}),
    "phi3-longrope": ("phi3", {"original_max_position_embeddings": 16, "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.1, 1.2, 1.5],
        "long_factor": [1.0, 2.0, 3.0, 4.0], "original_max_position_embeddings": 16}}),
    "olmo2": ("olmo2", {}),
    "gpt2": ("gpt2", {**GPT, "tie_word_embeddings": True}),
    "gpt_neox": ("gpt_neox", {"hidden_act": "gelu"}),
    "gpt_neox-sequential": ("gpt_neox", {"use_parallel_residual": False}),
    "gptj": ("gptj", {**GPT, "rotary_dim": 4}),
    "gpt_oss": ("gpt_oss", {"head_dim": 8, "num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 6,
                            "router_aux_loss_coef": 0.0, "rope_parameters": {**YARN, "truncate": False}}),
    "deepseek_v2": ("deepseek_v2", {**LATENT, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2,
                                    "routed_scaling_factor": 1.5, "rope_parameters": {
                                        **YARN, "mscale": 0.7, "mscale_all_dim": 0.7}}),
    "deepseek_v2-lite": ("deepseek_v2", {**LATENT, "q_lora_rank": None}),
    "deepseek_v3": ("deepseek_v3", {**LATENT, "n_group": 4, "topk_group": 2, "num_nextn_predict_layers": 0,
                                    "num_mtp_layers": 0,
                                    "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}}),
    "falcon": ("falcon", {"bias": False}),
    "falcon-grouped": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-alibi": ("falcon", {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}),
    "bloom": ("bloom", {"n_layer": 3, "n_head": 4, "tie_word_embeddings": True}),
    "opt": ("opt", {"ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0.0, "tie_word_embeddings": True}),
    "mpt": ("mpt", {"d_model": 32, "n_heads": 4, "n_layers": 3, "max_seq_len": 64, "tie_word_embeddings": True,
                    "attn_config": {"clip_qkv": 0.2}}),
    "starcoder2": ("starcoder2", {"sliding_window": 9, "residual_dropout": 0.0, "embedding_dropout": 0.0,
                                  "tie_word_embeddings": True}),
    "cohere": ("cohere", {"tie_word_embeddings": True}),
    "glm4": ("glm4", {"head_dim": 8}),
    "granite": ("granite", {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.4,
                            "attention_multiplier": 0.25}),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 2, "tie_word_embeddings": True}),
    "stablelm": ("stablelm", {"use_qkv_bias": True}),
    "stablelm-parallel": ("stablelm", {"use_parallel_residual": True}),
    "llama4_text": ("llama4_text", {"intermediate_size_mlp": 40, "intermediate_size": 24, "num_local_experts": 4,
                                    "num_experts_per_tok": 1, "interleave_moe_layer_step": 2, "head_dim": 8,
                                    "attention_chunk_size": 8, "floor_scale": 4, "attn_scale": 0.2,
                                    "router_aux_loss_coef": 0.0}),
    "gpt_bigcode": ("gpt_bigcode", {**GPT, "multi_query": True, "tie_word_embeddings": True}),
    "gpt_bigcode-heads": ("gpt_bigcode", {**GPT, "multi_query": False, "tie_word_embeddings": True}),
}

# Dropout of families that have it by default.
DRY = ["attention_dropout", "hidden_dropout", "classifier_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop"]


def mix(z):
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def text(vocab, seed, seq, number):
    """A sample of the built-in text and the token behind it (crates/exec/src/data/corpus.rs)."""
    words = min(vocab - 1, 255)
    multiplier = next(m for m in range(words * 618 // 1000, 0, -1) if numpy.gcd(m, words) == 1)

    def sentence(number):
        counter = mix(number * GOLDEN & MASK)
        first = mix(mix((seed + GOLDEN) & MASK) ^ counter)
        choices = mix(mix((seed + 2 * GOLDEN) & MASK) ^ counter)
        tokens = [0, 1 + (first * words >> 64)]
        for _ in range(9):
            k = [0, 0, 0, 0, 1, 1, 2, 3][choices & 7]
            choices >>= 3
            tokens.append(1 + (multiplier * (tokens[-1] - 1) + 1 + k) % words)
        return tokens + tokens[1:6]

    first = number * seq // 16
    return [token for s in range(first, first + seq // 16 + 1) for token in sentence(s)][: seq + 1]


def weights(name, shape):
    """Numbers of a tensor: uniform, from its name; gains are near one."""
    seed = 0xCBF29CE484222325
    for byte in name.encode():
        seed = ((seed ^ byte) * 0x100000001B3) & MASK
    count = int(numpy.prod(shape)) if shape else 1
    with numpy.errstate(over="ignore"):
        z = numpy.uint64(seed) + numpy.arange(count, dtype=numpy.uint64) * numpy.uint64(GOLDEN)
        z = (z ^ (z >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
        z ^= z >> numpy.uint64(31)
    v = (z >> numpy.uint64(40)).astype(numpy.float32) / numpy.float32(1 << 24) - numpy.float32(0.5)
    gain = len(shape) == 1 and name.endswith("weight")
    v = numpy.float32(1) + numpy.float32(0.4) * v if gain else numpy.float32(0.6) * v
    return torch.from_numpy(v.reshape(shape))


def checkpoint(name, directory):
    """Writes a checkpoint of a family; returns the model that transformers loads from it."""
    kind, changes = FAMILIES[name]
    settings = {**BASE, **{key: 0.0 for key in DRY}, **changes}
    config = transformers.AutoConfig.for_model(kind)
    accepted = {key: value for key, value in settings.items()
                if hasattr(config, key) or key in changes or key in getattr(config, "attribute_map", {})}
    config = type(config)(**accepted)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).float().save_pretrained(directory)
    for path in pathlib.Path(directory).glob("*.safetensors"):
        with safetensors.safe_open(path, "pt") as file:
            tensors = {key: weights(key, list(file.get_tensor(key).shape)) for key in file.keys()}
        safetensors.torch.save_file(tensors, path, {"format": "pt"})
    return load(directory)


def load(directory):
    config = transformers.AutoConfig.from_pretrained(directory)
    # transformers 5's eager Falcon adds ALiBi to the scores and once more by the mask; its default does not.
    how = "sdpa" if config.model_type == "falcon" and config.alibi else "eager"
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation=how)
    return model.eval()


def batch(vocab):
    tokens = torch.tensor([text(vocab, 7, SEQ, number) for number in range(SAMPLES)])
    return tokens[:, :-1], tokens[:, 1:]


def learn(model):
    """Logits, loss and gradients by name in the file, of the batch."""
    model.zero_grad()
    vocab = model.get_input_embeddings().weight.shape[0]
    tokens, targets = batch(vocab)
    logits = model(tokens, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))
    loss.backward()
    return logits.detach(), loss.item()


def stored_gradients(model, directory):
    """Gradients in the layout of files: the model is saved with gradients instead of weights."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad if parameter.grad is not None else torch.zeros_like(parameter))
    model.save_pretrained(directory)
    return tensors_of(directory)


def tensors_of(directory):
    tensors = {}
    for path in sorted(pathlib.Path(directory).glob("*.safetensors")):
        tensors.update(safetensors.torch.load_file(path))
    return tensors


def greedy(model):
    tokens = list(PROMPT)
    with torch.no_grad():
        for _ in range(SAID):
            tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(PROMPT):]


def relative(ours, theirs):
    return float((ours - theirs).norm() / theirs.norm().clamp_min(1e-12))


def run(binary, *arguments):
    done = subprocess.run([binary, *arguments], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(arguments)}: {done.stderr or done.stdout}")
    return done.stdout


def train(binary, source, target, out, lr):
    printed = run(binary, "train", "--init-from", source, "--seq", str(SEQ), "--global-batch", str(SAMPLES),
                  "--micro-batch", str(SAMPLES), "--iterations", "1", "--lr", str(lr), "--warmup", "0", "--optimizer",
                  "sgd", "--weight-decay", "0", "--clip", "0", "--seed", "7", "--data", "builtin", "--tokenizer",
                  "builtin", "--out", out, "--export-hf", target, "--json")
    records = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    return next(record["loss"] for record in records if record.get("iteration") == 1)


def compare(binary, name, room):
    room = pathlib.Path(room)
    first = str(room / "theirs")
    model = checkpoint(name, first)
    logits, loss = learn(model)
    said = greedy(model)
    before = tensors_of(first)
    gradients = stored_gradients(model, room / "gradients")
    rate = 1.0
    ours = train(binary, first, str(room / "stepped"), str(room / "run1"), rate)
    train(binary, first, str(room / "same"), str(room / "run2"), 0)
    train(binary, str(room / "same"), str(room / "again"), str(room / "run3"), 0)
    after, worst = tensors_of(room / "stepped"), 0.0
    if before.keys() != after.keys():
        raise RuntimeError(f"tensors of one side only: {sorted(before.keys() ^ after.keys())}")
    for key, weight in before.items():
        moved, gradient = (weight - after[key]) / rate, gradients[key]
        if key.endswith("e_score_correction_bias"):
            continue  # A router's bias for the choice follows the load of its experts instead of a gradient.
        if name == "opt" and key.endswith("embed_positions.weight"):
            moved, gradient = moved[2:], gradient[2:]  # Two rows are of no position.
        # Gradients that are zero but for rounding, as those of keys' biases, have no digits to compare.
        worst = max(worst, float((moved - gradient).norm() / gradient.norm().clamp_min(1e-3)))
    spoken = json.loads(run(binary, "generate", first, "--prompt", bytes(PROMPT).decode(), "--tokens", str(SAID),
                            "--temperature", "0", "--tokenizer", "builtin", "--json"))
    files = ["config.json", "model.safetensors"]
    same = all((room / "same" / f).read_bytes() == (room / "again" / f).read_bytes() for f in files)
    reloaded, _ = learn(load(room / "same"))
    result = {
        "loss": abs(ours / loss - 1), "gradients": worst, "greedy": spoken["tokens"][-SAID:] == said,
        "rewritten": same, "reloaded": relative(reloaded, logits),
    }
    good = (result["loss"] < 1e-5 and worst < 1e-4 and result["greedy"] and same and result["reloaded"] < 1e-5)
    return result, good


def fixtures(directory, names):
    for name in names:
        with tempfile.TemporaryDirectory() as room:
            model = checkpoint(name, room)
            config = json.loads((pathlib.Path(room) / "config.json").read_text())
            logits, loss = learn(model)
            norm = torch.sqrt(sum((p.grad.double() ** 2).sum() for p in model.parameters() if p.grad is not None))
            fixture = {"config": config, "loss": loss, "gradient_norm": float(norm), "prompt": PROMPT,
                       "said": greedy(model), "tokens": batch(256)[0][0].tolist(),
                       "logits": [round(float(x), 7) for x in logits[0, -1, :16]]}
            for key in ["transformers_version", "architectures"]:
                config.pop(key, None)
            path = pathlib.Path(directory) / f"{name}.json"
            path.write_text(json.dumps(fixture, indent=1) + "\n")
            print(path)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("binary", nargs="?")
    parser.add_argument("families", nargs="*")
    parser.add_argument("--fixtures")
    flags = parser.parse_args()
    torch.set_num_threads(1)
    if flags.fixtures:
        return fixtures(flags.fixtures, [flags.binary, *flags.families] if flags.binary else FAMILIES)
    bad = 0
    print(f"{'family':22} {'loss':>9} {'gradients':>9} {'greedy':>7} {'rewritten':>9} {'reloaded':>9}")
    for name in flags.families or FAMILIES:
        with tempfile.TemporaryDirectory() as room:
            try:
                r, good = compare(flags.binary, name, room)
                print(f"{name:22} {r['loss']:9.1e} {r['gradients']:9.1e} {str(r['greedy']):>7} "
                      f"{str(r['rewritten']):>9} {r['reloaded']:9.1e}{'' if good else '  <-- differs'}", flush=True)
            except Exception as error:  # A family that fails must not hide the others.
                good = False
                print(f"{name:22} {str(error).strip()[:400]}", flush=True)
            bad += not good
    print(f"{len(flags.families or FAMILIES) - bad} agree, {bad} do not")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
