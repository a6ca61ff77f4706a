"""FlashAttention for JAX: exact, linear in memory, differentiable."""

from .api import attention as attention
from .api import attention_with_lse as attention_with_lse
from .api import dot_product_attention as dot_product_attention
from .api import explain as explain
from .api import varlen_attention as varlen_attention
from .api import varlen_attention_with_lse as varlen_attention_with_lse
from .backends import interpret as interpret
from .dropout import Dropout as Dropout
from .masks import Causal as Causal
from .masks import Dense as Dense
from .masks import Function as Function
from .masks import Mask as Mask
from .masks import Prefix as Prefix
from .masks import Segments as Segments
from .masks import Window as Window
from .packing import pack as pack
from .packing import segment_ids as segment_ids
from .packing import segment_positions as segment_positions
from .packing import unpack as unpack
from .rotary import apply_rotary as apply_rotary
from .rules import CHECKPOINT_NAMES as CHECKPOINT_NAMES
from .score_mods import Alibi as Alibi
from .score_mods import SoftCap as SoftCap
from .score_mods import alibi_slopes as alibi_slopes

__version__ = "0.1.0"


def __getattr__(name: str):
    # Loaded by those who use them, not by `import jflash`: two of them need Flax.
    if name in ("flash_attn", "linen", "nnx"):
        import importlib

        return importlib.import_module(f"jflash.{name}")
    raise AttributeError(f"module 'jflash' has no attribute {name!r}")
