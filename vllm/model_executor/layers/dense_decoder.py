"""The decoder that the dense families share: pre-norm blocks on a residual stream."""

from collections.abc import Iterable
from functools import cached_property

import torch
from torch import nn

from vllm._cpu_ops_decoder import DecoderLayerWeights
from vllm._cpu_ops_torch import LinearStatistics
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.embedding import VocabEmbedding
from vllm.model_executor.layers.layer import Layer
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import Linear
from vllm.model_executor.layers.mlp import GatedMLP
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.transformers_utils.config import HfConfig
from vllm.v1.attention.backend import AttentionBackend, LayersRunner
from vllm.v1.kv_cache_interface import FullAttentionSpec


class SelfAttention(Layer):
    """Projections, rotary embedding and attention of one layer.

    Args:
        layer_name: of the attention, as its cache is named.
        has_qk_norm: normalise each query and key head before it is rotated.
    """

    def __init__(
        self,
        config: HfConfig,
        layer_name: str,
        rotary: RotaryEmbedding,
        backend: type[AttentionBackend],
        dtype: torch.dtype,
        *,
        has_qk_norm: bool,
    ) -> None:
        super().__init__()
        num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        head_dim = config.head_dim
        q_size, kv_size = num_heads * head_dim, num_kv_heads * head_dim
        self.split_sizes = (q_size, kv_size, kv_size)
        self.head_dim = head_dim
        self.qkv_proj = Linear(
            config.hidden_size,
            {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size},
            bias=config.attention_bias,
            dtype=dtype,
        )
        self.o_proj = Linear(
            q_size,
            {"o_proj": config.hidden_size},
            bias=config.attention_out_bias,
            dtype=dtype,
        )
        self.q_norm = self.k_norm = None
        if has_qk_norm:
            self.q_norm = RMSNorm(head_dim, config.rms_norm_eps, "q_norm", dtype)
            self.k_norm = RMSNorm(head_dim, config.rms_norm_eps, "k_norm", dtype)
        self.rotary = rotary
        self.attn = Attention(
            layer_name, num_heads, head_dim, head_dim**-0.5, num_kv_heads, backend
        )

    def forward(self, positions: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return [T, hidden_size] of x [T, hidden_size] at positions [T]."""
        q, k, v = self.qkv_proj(x).split(self.split_sizes, dim=-1)
        if self.q_norm is not None and self.k_norm is not None:
            self.q_norm.forward_in_place(q.unflatten(-1, (-1, self.head_dim)))
            self.k_norm.forward_in_place(k.unflatten(-1, (-1, self.head_dim)))
        self.rotary(positions, q, k)
        return self.o_proj(self.attn(q, k, v))


class DecoderLayer(Layer):
    """Attention and feed-forward, each behind a norm of the residual stream."""

    def __init__(
        self,
        config: HfConfig,
        layer_name: str,
        rotary: RotaryEmbedding,
        backend: type[AttentionBackend],
        dtype: torch.dtype,
        *,
        has_qk_norm: bool,
    ) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps, "input_layernorm", dtype)
        self.self_attn = SelfAttention(
            config,
            f"{layer_name}.self_attn.attn",
            rotary,
            backend,
            dtype,
            has_qk_norm=has_qk_norm,
        )
        self.post_attention_layernorm = RMSNorm(
            size, eps, "post_attention_layernorm", dtype
        )
        self.mlp = GatedMLP(size, config.intermediate_size, config.mlp_bias, dtype)

    def forward(self, positions: torch.Tensor, stream: torch.Tensor) -> None:
        """Run the layer.

        Args:
            positions: [T] int64.
            stream: [T, hidden_size], the residual stream, changed in place.
        """
        stream += self.self_attn(positions, self.input_layernorm(stream))
        stream += self.mlp(self.post_attention_layernorm(stream))

    def compiled_weights(self) -> DecoderLayerWeights | None:
        """Return the layer as the compiled operators read it; None if others do."""
        attention, attn, mlp = self.self_attn, self.self_attn.attn, self.mlp
        qkv = attention.qkv_proj.compiled_weights()
        o = attention.o_proj.compiled_weights()
        gate_up = mlp.gate_up_proj.compiled_weights()
        down = mlp.down_proj.compiled_weights()
        if qkv is None or o is None or gate_up is None or down is None:
            return None
        q_norm, k_norm = attention.q_norm, attention.k_norm
        return DecoderLayerWeights(
            input_norm=self.input_layernorm.weight,
            post_norm=self.post_attention_layernorm.weight,
            eps=self.input_layernorm.eps,
            qkv=qkv,
            o=o,
            gate_up=gate_up,
            down=down,
            q_norm=None if q_norm is None else q_norm.weight,
            k_norm=None if k_norm is None else k_norm.weight,
            cos_sin_cache=attention.rotary.cos_sin_cache,
            num_heads=attn.num_heads,
            num_kv_heads=attn.num_kv_heads,
            head_size=attn.head_size,
            scale=attn.scale,
        )


class DecoderLayers(nn.ModuleList):
    """Neighbouring layers, in one operation where the backend has it.

    Args:
        layers: of one shape.
    """

    def __init__(self, layers: Iterable[DecoderLayer]) -> None:
        in_order = tuple(layers)
        super().__init__(in_order)
        # A tuple, so that the layers are not registered a second time.
        self._in_order = in_order
        self._cache_names = tuple(layer.self_attn.attn.layer_name for layer in in_order)

    def run(
        self,
        positions: torch.Tensor,
        stream: torch.Tensor,
        tap_layer_ids: tuple[int, ...] = (),
    ) -> list[torch.Tensor]:
        """Run all layers.

        Args:
            positions: [T] int64.
            stream: [T, hidden_size], the residual stream, changed in place.
            tap_layer_ids: i is the stream that enters layer i; the number of layers is
                the stream in the end.

        Returns:
            The tapped streams, in the order of their ids.
        """
        taps = None
        if tap_layer_ids:
            taps = stream.new_empty(len(tap_layer_ids), *stream.shape)
        context = get_forward_context()
        if context.attn_metadata is None or self._fused is None:
            self._run_singly(positions, stream, tap_layer_ids, taps)
        else:
            kv_caches = [context.kv_caches[name] for name in self._cache_names]
            self._fused(
                stream,
                positions,
                kv_caches,
                context.attn_metadata,
                tap_layer_ids,
                taps,
            )
        return [] if taps is None else list(taps.unbind())

    def _run_singly(
        self,
        positions: torch.Tensor,
        stream: torch.Tensor,
        tap_layer_ids: tuple[int, ...],
        taps: torch.Tensor | None,
    ) -> None:
        place_of = {layer_idx: place for place, layer_idx in enumerate(tap_layer_ids)}
        for layer_idx in range(len(self) + 1):
            if taps is not None and layer_idx in place_of:
                taps[place_of[layer_idx]] = stream
            if layer_idx < len(self):
                self._in_order[layer_idx](positions, stream)

    @cached_property
    def _fused(self) -> LayersRunner | None:
        """The layers as one operation; asked for when the weights are laid out."""
        weights = self.compiled_weights()
        if weights is None:
            return None
        return self._in_order[0].self_attn.attn.backend.maybe_fuse_layers(weights)

    def compiled_weights(self) -> list[DecoderLayerWeights] | None:
        """Return the layers as the compiled operators read them; None if others do."""
        weights = [layer.compiled_weights() for layer in self._in_order]
        found = [one for one in weights if one is not None]
        return found if len(found) == len(weights) else None


class DenseDecoder(Layer):
    """Embedding, layers and final norm; also what a drafter taps on the way."""

    def __init__(
        self,
        config: HfConfig,
        num_positions: int,
        backend: type[AttentionBackend],
        dtype: torch.dtype,
        *,
        has_qk_norm: bool,
    ) -> None:
        super().__init__()
        self.embed_tokens = VocabEmbedding(
            config.vocab_size, config.hidden_size, "embed_tokens", dtype
        )
        rotary = RotaryEmbedding(config, num_positions)
        self.layers = DecoderLayers(
            DecoderLayer(
                config,
                f"model.layers.{layer_idx}",
                rotary,
                backend,
                dtype,
                has_qk_norm=has_qk_norm,
            )
            for layer_idx in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, "norm", dtype)
        self.tap_layer_ids: tuple[int, ...] = ()

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor | tuple[torch.Tensor, list[torch.Tensor]]:
        """Return hidden states [T, hidden_size] after the final norm, and the taps."""
        stream = self.embed_tokens(input_ids)
        taps = self.layers.run(positions, stream, self.tap_layer_ids)
        hidden_states = self.norm(stream)
        return (hidden_states, taps) if self.tap_layer_ids else hidden_states


class DenseCausalLM(Layer):
    """A dense decoder with its output layer; the base of one architecture a file.

    Args:
        vllm_config: of the engine.
        backend: attention on the model's device.
    """

    has_qk_norm = False

    def __init__(
        self, vllm_config: VllmConfig, backend: type[AttentionBackend]
    ) -> None:
        super().__init__()
        model_config = vllm_config.model_config
        config = model_config.hf_config
        self.dtype = getattr(torch, model_config.dtype)
        self.model = DenseDecoder(
            config,
            max(model_config.max_model_len, config.max_position_embeddings),
            backend,
            self.dtype,
            has_qk_norm=self.has_qk_norm,
        )
        is_tied = config.tie_word_embeddings
        self.lm_head = Linear(
            config.hidden_size,
            {"lm_head": config.vocab_size},
            bias=False,
            dtype=self.dtype,
            tied_embedding=self.model.embed_tokens if is_tied else None,
        )

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor | tuple[torch.Tensor, list[torch.Tensor]]:
        """Run the decoder.

        Args:
            input_ids: [T] int64.
            positions: [T] int64, absolute.

        Returns:
            [T, hidden_size] after the final norm; with taps, a pair of it and the
            tapped states, [T, hidden_size] each, in the order of their ids.
        """
        return self.model(input_ids, positions)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return [N, vocab_size] float32 of hidden states [N, hidden_size]."""
        return self.lm_head(hidden_states).float()

    def maybe_compute_argmax(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """Return [N] int64, the likeliest tokens, where logits need not be written."""
        return self.lm_head.maybe_argmax(hidden_states)

    def maybe_compute_statistics(
        self,
        hidden_states: torch.Tensor,
        listed_rows: torch.Tensor,
        count: int,
        written_rows: torch.Tensor,
    ) -> LinearStatistics | None:
        """Return what samplers read of the logits, where not all need be written.

        Args:
            hidden_states: [N, hidden_size].
            listed_rows: [n] int64, increasing; of which the likeliest are wanted.
            count: of these.
            written_rows: [m] int64, increasing; of which all logits are wanted.
        """
        return self.lm_head.maybe_statistics(
            hidden_states, listed_rows, count, written_rows
        )

    def set_aux_hidden_state_layers(self, layer_ids: tuple[int, ...]) -> None:
        """Make `forward` return the residual stream at some layers too.

        Args:
            layer_ids: i is the stream that enters layer i, which is the output of
                layer i - 1; the number of layers is the stream before the final norm.
                Empty for none.

        Raises:
            ValueError: there is no such layer, or one is named twice.
        """
        num_layers = len(self.model.layers)
        if len(set(layer_ids)) != len(layer_ids) or not all(
            0 <= layer_idx <= num_layers for layer_idx in layer_ids
        ):
            raise ValueError(
                f"tapped layers must be different ids in 0..{num_layers}, "
                f"got {layer_ids}"
            )
        self.model.tap_layer_ids = tuple(layer_ids)

    def get_kv_cache_specs(
        self, block_size: int, dtype: torch.dtype
    ) -> dict[str, FullAttentionSpec]:
        """Return what each attention layer stores, by the layer's name.

        Args:
            block_size: tokens a block.
            dtype: of keys and values.
        """
        return {
            module.layer_name: FullAttentionSpec(
                block_size, module.num_kv_heads, module.head_size, dtype
            )
            for module in self.modules()
            if isinstance(module, Attention)
        }
