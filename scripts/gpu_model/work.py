"""Work of a model's shape: bytes that a step reads, operations of a prompt, and bytes that devices exchange.

The counts are those of benches/src/gpu/work.rs, which a test holds to the same numbers.
"""

from typing import NamedTuple

NUMBER_BYTES = 2  # bf16 weights and activations, f16 keys and values
RANK_BLOCK = 16


class Shape(NamedTuple):
    """A dense model with gated feed-forward blocks."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocabulary: int

    @property
    def kv_width(self):
        return self.kv_heads * self.head_dim

    @property
    def products(self):
        """Rows and columns of the four launches of products in a layer, by name."""
        return {
            "q, k, v": (self.heads * self.head_dim + 2 * self.kv_width, self.hidden),
            "o": (self.hidden, self.heads * self.head_dim),
            "gate, up": (2 * self.inner, self.hidden),
            "down": (self.hidden, self.inner),
        }

    @property
    def block_weights(self):
        return self.layers * sum(rows * columns for rows, columns in self.products.values())

    @property
    def head_weights(self):
        return self.vocabulary * self.hidden

    @property
    def weight_bytes(self):
        """Bytes of the weights that a step reads; the one row of the embedding for each token is left out."""
        return (self.block_weights + self.head_weights) * NUMBER_BYTES

    def kv_bytes(self, streams, context):
        """Bytes of keys and values that a step reads."""
        return streams * context * 2 * self.layers * self.kv_width * NUMBER_BYTES

    def linear_flops(self, tokens):
        """Operations of the products of a prompt with logits of its last token."""
        return 2 * (self.block_weights * tokens + self.head_weights)

    def attention_flops(self, tokens):
        """Operations of attention over the causal half."""
        return 4 * self.layers * self.heads * self.head_dim * tokens * (tokens + 1) / 2

    def factor_bytes(self, rank, targets):
        """Bytes of A, and bytes of B, of an adapter of a rank on some targets of one layer."""
        outputs = {"q": self.heads * self.head_dim, "k": self.kv_width, "v": self.kv_width, "o": self.hidden}
        inputs = {"o": self.heads * self.head_dim}
        a = sum(inputs.get(target, self.hidden) for target in targets)
        return rank * a * NUMBER_BYTES, rank * sum(outputs[target] for target in targets) * NUMBER_BYTES

    def gathered_bytes(self):
        """Bytes of outputs that a token has gathered in a layer if every product is cut by its outputs."""
        return NUMBER_BYTES * (self.heads * self.head_dim + self.hidden + self.inner + self.hidden)

    def reduced_bytes(self):
        """Bytes of sums that a token has reduced in a layer if o and down are cut by their inputs."""
        return NUMBER_BYTES * 2 * self.hidden


LLAMA_2_7B = Shape(4096, 32, 32, 32, 128, 11008, 32000)
LLAMA_3_70B = Shape(8192, 80, 64, 8, 128, 28672, 128256)
