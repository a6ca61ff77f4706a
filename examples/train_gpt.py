"""Trains a GPT on the source code of Python's standard library, byte by byte.

    python examples/train_gpt.py                          # tiny: three minutes on two CPU cores
    python examples/train_gpt.py --preset gpt2-small      # GPT-2's smallest shape, for a GPU
    python examples/train_gpt.py --compare --steps 100    # jflash beside dense attention
    python examples/train_gpt.py --mesh data=4,tensor=2   # on 8 devices, by batch and by heads

After an interruption, even kill -9, the same command resumes from the last checkpoint and ends in
bitwise the same losses and parameters, because a batch is a function of (seed, step) alone. (On a
GPU, XLA promises that much only under XLA_FLAGS=--xla_gpu_deterministic_ops=true.) `--fresh` starts
over. A mesh changes no loss but by rounding; JAX_NUM_CPU_DEVICES=8 makes eight devices of a CPU. The
output folder gets checkpoints and `curve.png`; the terminal gets a page of sampled Python and the validation
loss beside that of a bigram table.
"""

import argparse
import contextlib
import dataclasses
import math
import re
import shutil
import sysconfig
import time
import zlib
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from tqdm import tqdm

import jflash
from jflash.nnx import FlashMultiHeadAttention
from jflash.rotary import Rotary

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402  (after the backend is chosen)

VOCABULARY = 256
# "jflash" is the best one for the platform, "reference" dense attention.
IMPLEMENTATIONS = {"jflash": None, "xla": "xla", "reference": "reference"}


@dataclasses.dataclass(frozen=True)
class Config:
    """All that determines a run, saved with its checkpoints. The defaults suit two CPU cores."""

    layers: int = 3
    width: int = 128
    heads: int = 2
    length: int = 64  # tokens in a sequence, T
    batch: int = 16
    steps: int = 400
    learning_rate: float = 2e-3
    warmup: int = 40
    evaluate_every: int = 100
    save_every: int = 100
    windows: int = 1024  # validation sequences
    dtype: str = "float32"  # of the computation; parameters are float32
    remat: bool = False  # whether backward recomputes each block instead of storing it
    attention: str = "jflash"
    seed: int = 0


PRESETS = {
    "tiny": Config(),
    "gpt2-small": Config(
        layers=12,
        width=768,
        heads=12,
        length=1024,
        batch=32,
        steps=1000,
        learning_rate=6e-4,
        warmup=100,
        windows=256,
        save_every=500,
        dtype="bfloat16",
        remat=True,
    ),
}


class Block(nnx.Module):
    """Adds attention, then an MLP, to the residual stream, each after a LayerNorm."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        normal = nnx.initializers.normal(0.02)
        settings = dict(dtype=config.dtype, kernel_init=normal, rngs=rngs)
        norm = partial(nnx.LayerNorm, config.width, use_bias=False, dtype=config.dtype, rngs=rngs)
        self.attention_norm, self.mlp_norm = norm(), norm()
        self.attention = FlashMultiHeadAttention(
            config.width,
            config.heads,
            rotary=Rotary(),
            implementation=IMPLEMENTATIONS[config.attention],
            **settings,
        )
        self.up = nnx.Linear(config.width, 4 * config.width, use_bias=False, **settings)
        self.down = nnx.Linear(4 * config.width, config.width, use_bias=False, **settings)
        # As in GPT-2: the more layers add to the residual stream, the less each adds.
        for linear in (self.attention.out, self.down):
            linear.kernel[...] *= (2 * config.layers) ** -0.5

    def __call__(self, x):
        x = x + self.attention(self.attention_norm(x), mask=jflash.Causal())
        return x + self.down(nnx.gelu(self.up(self.mlp_norm(x))))


class GPT(nnx.Module):
    """Maps tokens `[B, T]` to the logits `[B, T, 256]` of the tokens that follow."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        normal = nnx.initializers.normal(0.02)
        self.embed = nnx.Embed(VOCABULARY, config.width, dtype=config.dtype, embedding_init=normal, rngs=rngs)
        self.blocks = nnx.List(Block(config, rngs) for _ in range(config.layers))
        self.norm = nnx.LayerNorm(config.width, use_bias=False, dtype=config.dtype, rngs=rngs)
        self.remat = config.remat

    def __call__(self, tokens):
        # What attention saves is kept: computing it again costs the most for its size.
        policy = jax.checkpoint_policies.save_only_these_names(*jflash.CHECKPOINT_NAMES)
        apply = jax.checkpoint(Block.__call__, policy=policy) if self.remat else Block.__call__
        x = self.embed(tokens)
        for block in self.blocks:
            x = apply(block, x)
        return self.embed.attend(self.norm(x)).astype(jnp.float32)  # weights tied to the embedding


def mean_loss(model, windows):
    """Returns the mean cross entropy, in nats, of each token `[B, T + 1]` given those before it."""
    logits = model(windows[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:]).mean()


@partial(jax.jit, static_argnames=("graph", "length"))
def sample(graph, params, text, start, length, key, temperature=0.8):
    """Returns `text [n]` with the tokens from `start` on drawn from the model, `length` in view."""
    model = nnx.merge(graph, params)

    def draw(i, text):
        first = jnp.maximum(0, i - length)  # what lies ahead in the window is causally invisible
        window = jax.lax.dynamic_slice(text, [first], [length])
        logits = model(window[None])[0, i - 1 - first] / temperature
        return text.at[i].set(jax.random.categorical(jax.random.fold_in(key, i), logits))

    return jax.lax.fori_loop(start, text.size, draw, text)


def standard_library():
    """Returns (training bytes, validation bytes): whole files, a tenth of them held out.

    A hash of its name decides for each file, so that no other file can move it to the other side.
    """
    root = Path(sysconfig.get_path("stdlib"))
    sets = {True: [], False: []}
    for path in sorted(root.rglob("*.py"), key=Path.as_posix):
        name = path.relative_to(root).as_posix()
        # Installed packages are not the library; its tests are not on every machine.
        if not {"site-packages", "dist-packages", "test"} & set(name.split("/")):
            sets[zlib.crc32(name.encode()) % 10 == 0].append(path.read_bytes() + b"\0")
    return tuple(np.frombuffer(b"".join(sets[held_out]), np.uint8) for held_out in (False, True))


def windows_at(data, starts, length):
    """Returns `[B, length + 1]` tokens: inputs, and targets one further."""
    return data[starts[:, None] + np.arange(length + 1)].astype(np.int32)


def batch_at(data, config, step):
    """Returns the batch of `step`, a function of seed and step alone: resuming needs no state."""
    starts = np.random.default_rng([config.seed, step]).integers(0, data.size - config.length, config.batch)
    return windows_at(data, starts, config.length)


def make_mesh(axes):
    """Returns a context with a mesh of these {name: size}, or one without a mesh if all sizes are 1."""
    sizes = {"data": 1, "tensor": 1} | axes
    needed = math.prod(sizes.values())
    if needed == 1:
        return contextlib.nullcontext()
    if needed > jax.device_count():
        raise SystemExit(
            f"--mesh needs {needed} devices; there are {jax.device_count()}. JAX_NUM_CPU_DEVICES={needed} in "
            f"the environment makes as many of a CPU."
        )
    automatic = (AxisType.Auto,) * len(sizes)  # XLA shards all that follows from parameters and batch
    devices = jax.devices()[:needed]
    return jax.set_mesh(jax.make_mesh(tuple(sizes.values()), tuple(sizes), automatic, devices=devices))


def place(x, *spec):
    """Returns `x`, with its axes along the mesh axes named in `spec`, if there is a mesh."""
    mesh = jax.sharding.get_mesh()
    return x if mesh.empty else jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))


def place_parameters(params):
    """Returns `params`, with heads and the width within the MLP along "tensor", if there is a mesh."""
    along = dict.fromkeys(("query", "key", "value", "up"), (None, "tensor"))
    along |= dict.fromkeys(("out", "down"), ("tensor",))

    def placed(path, x):  # .../query/kernel/value
        layer = jax.tree_util.keystr(path, simple=True, separator="/").split("/")[-3]
        return place(x, *along.get(layer, ()))

    return jax.tree.map_with_path(placed, params)


def validation_windows(data, config):
    """Returns `[windows, T + 1]` tokens spread evenly over the held-out files."""
    starts = np.linspace(0, data.size - config.length - 1, config.windows).astype(int)
    return windows_at(data, starts, config.length)


def bigram_loss(train, windows):
    """Returns (loss in nats, smoothing constant) of a table of byte pairs.

    The constant is the one that suits the table best on the very windows that are scored.
    """
    counts = np.bincount(train[:-1].astype(int) * VOCABULARY + train[1:], minlength=VOCABULARY**2)
    counts = counts.reshape(VOCABULARY, VOCABULARY)
    losses = {}
    for smoothing in 10.0 ** np.arange(-4, 2.25, 0.25):
        table = np.log(counts + smoothing) - np.log(counts.sum(1, keepdims=True) + VOCABULARY * smoothing)
        losses[smoothing] = -table[windows[:, :-1], windows[:, 1:]].mean()
    smoothing = min(losses, key=losses.get)
    return losses[smoothing], smoothing


def make_optimizer(config):
    """Returns AdamW with clipping, warmup, cosine decay, and weight decay on matrices only."""
    schedule = optax.warmup_cosine_decay_schedule(
        0.0,
        config.learning_rate,
        warmup_steps=min(config.warmup, config.steps // 2),
        decay_steps=config.steps,
        end_value=config.learning_rate / 10,
    )
    decayed = partial(jax.tree.map, lambda p: p.ndim > 1)
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=0.1, mask=decayed),
    )


def make_step(graph, optimizer):
    """Returns a jitted `(state, windows) -> (state, loss)` that reuses the memory of `state`."""

    @partial(jax.jit, donate_argnames="state")
    def step(state, windows):
        params, memory = state
        loss, grads = jax.value_and_grad(lambda p: mean_loss(nnx.merge(graph, p), windows))(params)
        updates, memory = optimizer.update(grads, memory, params)
        return (optax.apply_updates(params, updates), memory), loss

    return step


def make_evaluate(graph, windows, batch):
    """Returns `params -> loss` over all of `windows`."""
    loss = jax.jit(lambda params, windows: mean_loss(nnx.merge(graph, params), windows))
    parts = [place(part, "data") for part in np.split(windows, range(batch, len(windows), batch))]
    shares = np.array([len(part) for part in parts]) / len(windows)

    def evaluate(params):
        return float(shares @ np.array([loss(params, part) for part in parts], np.float64))

    return evaluate


def restore(manager, state, config):
    """Returns (state, history) of the newest checkpoint, or `state` and an empty history."""
    newest, now = manager.latest_step(), dataclasses.asdict(config)
    if newest is None:
        return state, {"config": now, "train": [], "valid": []}
    load = lambda **items: manager.restore(newest, args=ocp.args.Composite(**items))
    history = load(history=ocp.args.JsonRestore()).history
    was = history["config"]
    changed = [f"{name}={was.get(name)}" for name in now if was.get(name) != now[name]]
    if changed:
        raise SystemExit(
            f"{manager.directory} holds a run with {', '.join(changed)}. Resuming it with other "
            f"settings would be neither run. Pass --fresh to start over, or another --out."
        )
    return load(state=ocp.args.StandardRestore(state)).state, history


def train(config, data, windows, folder):
    """Returns (graph, params, history) after `config.steps` steps, resuming what `folder` holds."""
    graph, params = nnx.split(GPT(config, nnx.Rngs(config.seed)))
    params = place_parameters(params)
    optimizer = make_optimizer(config)
    step, evaluate = make_step(graph, optimizer), make_evaluate(graph, windows, config.batch)
    # Saving waits for the copy, because the next step overwrites the state.
    options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
    with ocp.CheckpointManager(folder.resolve(), options=options) as manager:
        state, history = restore(manager, (params, optimizer.init(params)), config)
        first, losses, speeds = len(history["train"]), [], []
        bar = tqdm(range(first, config.steps), config.attention, config.steps, initial=first)
        since = time.perf_counter()
        for i in bar:
            state, loss = step(state, place(batch_at(data, config, i), "data"))
            losses.append(loss)  # stays on the device, which runs ahead
            done = i + 1
            at_end = done == config.steps
            to_evaluate = at_end or done % config.evaluate_every == 0
            to_save = at_end or done % config.save_every == 0
            if not (to_evaluate or to_save or done % 10 == 0):
                continue
            history["train"] += map(float, losses)
            tokens = len(losses) * config.batch * config.length
            speeds.append(tokens / (time.perf_counter() - since))
            bar.set_postfix_str(f"loss {float(loss):.3f}, {speeds[-1]:,.0f} tokens/s")
            losses.clear()
            if to_evaluate:
                history["valid"].append([done, evaluate(state[0])])
            if to_save:
                save(manager, done, state, history)
            since = time.perf_counter()
    if speeds:
        print(f"{config.attention}: {np.median(speeds):,.0f} tokens/s{peak_memory()}")
    return graph, state[0], history


def save(manager, done, state, history):
    """Writes a checkpoint, which has its name only when whole: a kill leaves the one before."""
    items = dict(state=ocp.args.StandardSave(state), history=ocp.args.JsonSave(history))
    manager.save(done, args=ocp.args.Composite(**items))


def peak_memory():
    """Returns ", peak memory ..." of this process so far where the device counts it, else ""."""
    stats = jax.devices()[0].memory_stats() or {}
    peak = stats.get("peak_bytes_in_use")
    return f", peak memory {peak / 2**30:.2f} GiB" if peak else ""


def plot(histories, bigram, path):
    """Draws training and validation losses of each run, and the bigram's, into `path`."""
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for i, (name, history) in enumerate(histories.items()):
        axes.plot(history["train"], color=f"C{i}", alpha=0.35, lw=0.8, label=f"{name}, training")
        axes.plot(*zip(*history["valid"]), "o-", color=f"C{i}", ms=3, label=f"{name}, validation")
    axes.axhline(bigram, color="grey", ls="--", lw=1, label="bigram table, validation")
    axes.set(xlabel="step", ylabel="loss (nats per byte)")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def compare(histories, dtype):
    """Prints how far the training losses of two runs part; stops if float32 parts by 1e-3."""
    losses = np.array([history["train"][:100] for history in histories.values()])
    largest = np.abs(losses[0] - losses[1]).max()
    text = f"largest difference of losses over {losses.shape[1]} steps: {largest:.1e}"
    print(text)
    if dtype == "float32" and not largest <= 1e-3:
        raise SystemExit(f"{' and '.join(histories)} disagree: {text}, above 1e-3")


def write_text(graph, params, config, prompt=b"\0import "):
    """Returns sampled text that begins with `prompt`."""
    text = np.zeros(max(500, config.length), np.int32)
    text[: len(prompt)] = list(prompt)
    text = sample(graph, params, text, len(prompt), config.length, jax.random.key(config.seed))
    text = bytes(np.asarray(text, np.uint8)).decode("ascii", errors="replace").strip("\0")
    return re.sub(r"[^\n\t -~]", "?", text)  # an early model writes control characters, too


def mesh_axes(text):
    """Returns {name: size} of "data=4,tensor=2"."""
    found = re.fullmatch(r"(data|tensor)=([1-9]\d*)(?:,(?!\1)(data|tensor)=([1-9]\d*))?", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form data=4,tensor=2")
    pairs = zip(found.groups()[::2], found.groups()[1::2])
    return {name: int(size) for name, size in pairs if name}


def parse(argv):
    """Returns the command line as a namespace, with `config` built from preset and flags."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--preset", choices=PRESETS, default="tiny")
    parser.add_argument("--attention", default="jflash", help="of jflash, xla, reference (dense)")
    parser.add_argument("--compare", action="store_true", help="is --attention jflash,reference")
    parser.add_argument("--mesh", type=mesh_axes, default={}, help="such as data=4,tensor=2")
    parser.add_argument("--steps", type=int, help="training steps (default: the preset's)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="dtype of the computation")
    parser.add_argument("--seed", type=int, default=0, help="of parameters, data order and samples")
    parser.add_argument("--out", type=Path, help="output folder (default: out/train_gpt/PRESET)")
    parser.add_argument("--fresh", action="store_true", help="start over; deletes what it resumes")
    args = parser.parse_args(argv)
    args.attention = ["jflash", "reference"] if args.compare else args.attention.split(",")
    if unknown := set(args.attention) - set(IMPLEMENTATIONS):
        parser.error(f"--attention: {', '.join(unknown)} is none of {', '.join(IMPLEMENTATIONS)}")
    args.out = args.out or Path("out/train_gpt", args.preset)
    given = {name: getattr(args, name) for name in ("steps", "dtype", "seed")}
    given = {name: value for name, value in given.items() if value is not None}
    args.config = config = dataclasses.replace(PRESETS[args.preset], **given)
    if config.heads % args.mesh.get("tensor", 1):
        parser.error(f"--mesh: tensor must divide the {config.heads} heads")
    if math.gcd(config.batch, config.windows) % args.mesh.get("data", 1):
        parser.error(f"--mesh: data must divide the batch, {config.batch}, and the windows, {config.windows}")
    return args


def main(argv=None):
    """Trains, and returns {attention: history}."""
    args = parse(argv)
    data, held_out = standard_library()
    windows = validation_windows(held_out, args.config)
    bigram, smoothing = bigram_loss(data, windows)
    scored = windows[:, 1:].size
    print(f"bytes: {data.size:,} to train on, {held_out.size:,} held out, {scored:,} scored")

    histories, texts = {}, []
    for attention in args.attention:
        config = dataclasses.replace(args.config, attention=attention)
        folder = args.out / f"run-{attention}"
        if args.fresh:
            shutil.rmtree(folder, ignore_errors=True)
        with make_mesh(args.mesh):
            graph, params, histories[attention] = train(config, data, windows, folder)
            texts.append(write_text(graph, params, config))
    plot(histories, bigram, args.out / "curve.png")

    print(f"\n{texts[0]}\n\nvalidation loss in nats per byte:")
    for attention, history in histories.items():
        loss = history["valid"][-1][1]
        print(f"  {attention} {loss:.3f}, {loss - bigram:+.3f} against the bigram table")
    print(f"  bigram table {bigram:.3f}, smoothed by {smoothing:.2g}, the best for these bytes")
    print(f"curve: {args.out / 'curve.png'}")
    if len(histories) > 1:
        compare(histories, args.config.dtype)
    return histories


if __name__ == "__main__":
    main()
