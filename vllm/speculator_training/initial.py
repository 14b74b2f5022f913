"""Where a drafter starts: with what a look at the target already tells.

Random weights would find all of it as well, in thousands of steps: how large each part
of the target's states is, which tokens are like each other, that the last token before
a block matters most, and what follows from it and from the draft before, as far as a
linear map can say. A drafter that starts from the least squares of its target is
accepted from its first step.
"""

from dataclasses import dataclass

import torch

from vllm.speculator_training.features import FeatureStore
from vllm.speculator_training.losses import compute_position_weights
from vllm.speculator_training.modeling import DSparkTrainingModel

# Drafts of a block that the maps are fitted to.
_NUM_FITTED_DRAFTS = 3
_FIT_DECAY = 4.0
_RIDGE = 1e-3
# Deviations from which on a token counts less.
_FAR = 8.0
# Of each dimension of the table of predecessors.
_MARKOV_DEVIATION = 0.5
# Of the one dimension of a fused state that is the same for all tokens, before the
# norm; the others have a deviation of 1.
_COMMON_VALUE = 24.0
# Share of the fused state's dimensions that say what the linear map reads.
_FITTED_SHARE = 2 / 3
# Of queries and keys in each pair of dimensions that turns with the position.
_LOCAL_LENGTH = 4.0
# Such pairs of a head, from the fastest on: how sharply it looks at one place.
_NUM_LOCAL_PAIRS = 16
# How far before its slot each head of a group looks; slots further on, whose place
# would be in the block, see the last token before it.
_LOCAL_OFFSETS = (1, 2, 4)
# What is left of the random part of such a head.
_CONTENT_SHARE = 0.25
# One key head in this many, of all layers but the last, is left to look for contents.
_LOCAL_SHARE = 3
# Root mean square of what the linear map adds to the block's stream.
_VOICE = 2.0
# A map that explains a part of the states only should not speak as loud as they do.
_CAUTION = 0.75
# Of the random matrices that write to the stream.
_WRITE_SHARE = 0.1
_MIN_NORM = 0.3


@dataclass(frozen=True)
class LinearFit:
    """The target's final normed states y, read from taps t and a predecessor's x.

    y = constant + of_predecessor @ x + of_taps @ t, where x is the predecessor's
    embedding; x and t less their means.

    Args:
        tap_scales: [taps_size], what t is multiplied by to have a deviation of 1.
        constant: [hidden_size], as all [..., hidden_size] here.
        of_predecessor: [hidden_size, hidden_size].
        of_taps: [hidden_size, taps_size], of scaled taps.
        covariance: [taps_size, taps_size], of scaled taps.
        predecessor_mean: [hidden_size], of x.
        predecessor_covariance: [hidden_size, hidden_size], of x.
        common: [taps_size]; its product with any token's scaled taps is about 1.
    """

    tap_scales: torch.Tensor
    constant: torch.Tensor
    of_predecessor: torch.Tensor
    of_taps: torch.Tensor
    covariance: torch.Tensor
    common: torch.Tensor
    predecessor_mean: torch.Tensor
    predecessor_covariance: torch.Tensor


@torch.no_grad()
def start_from_target(
    model: DSparkTrainingModel, store: FeatureStore, indices: list[int]
) -> None:
    """Set the weights of a new drafter, over its random ones.

    Args:
        indices: of the sequences that the target is looked at with.
    """
    fit = fit_target(model, store, indices)
    _tabulate_predecessors(model, fit)
    for layer in model.draft_layers:
        layer.self_attn.o_proj.weight *= _WRITE_SHARE
        layer.mlp.down_proj.weight *= _WRITE_SHARE
    directions = _read_taps(model, fit)
    _look_at_the_last_tokens(model)
    _speak(model, fit, directions, store.runner.final_norm())


@torch.no_grad()
def fit_target(
    model: DSparkTrainingModel, store: FeatureStore, indices: list[int]
) -> LinearFit:
    """Fit what the drafts of a block are to say, by ridge regression."""
    _, deviations = store.measure_taps(indices)
    scales = deviations.reciprocal().float()
    embedding_scale = float(model.embedding.square().mean().rsqrt())
    hidden_size = model.embedding.shape[1]
    sums = _Sums(1 + len(scales) + hidden_size, hidden_size)
    num_drafts = min(_NUM_FITTED_DRAFTS, model.config.num_draft_tokens)
    weights = compute_position_weights(num_drafts, _FIT_DECAY).tolist()
    for idx in indices:
        (features,) = store.get([idx])
        sequence = store.sequences[idx]
        taps = features.states[:, :-1].flatten(1) * scales
        token_ids = sequence.token_ids.to(taps.device)
        first = max(sequence.num_prompt_tokens, 1)
        for draft, weight in enumerate(weights):
            anchors = torch.arange(first, len(taps) - draft)
            if not len(anchors):
                continue
            predecessors = model.embedding[token_ids[anchors + draft]]
            sums.add(
                taps[anchors - 1],
                predecessors * embedding_scale,
                features.states[anchors + draft, -1],
                weight,
            )
    return _solve(model, sums, scales, embedding_scale)


class _Sums:
    """Weighted products of what a draft reads, and with what it is to say.

    Args:
        num_inputs: a constant, the taps, and the token before the draft.
        num_outputs: values of the target's last state.
    """

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        self.gram = torch.zeros(num_inputs, num_inputs, dtype=torch.float64)
        self.cross = torch.zeros(num_inputs, num_outputs, dtype=torch.float64)
        self.total = 0.0

    def add(
        self,
        taps: torch.Tensor,
        predecessors: torch.Tensor,
        outputs: torch.Tensor,
        weight: float,
    ) -> None:
        """Add drafts.

        Args:
            taps: [N, taps], of deviation 1.
            predecessors: [N, hidden_size].
            outputs: [N, num_outputs].
            weight: of each.
        """
        inputs = torch.cat((taps.new_ones(len(taps), 1), taps, predecessors), dim=1)
        # A token with states far from all others' would bend the whole map.
        far = taps.abs().amax(dim=1, keepdim=True)
        weighted = inputs * (_FAR / far).clamp(max=1).square() * weight
        self.gram += (weighted.T @ inputs).cpu().double()
        self.cross += (weighted.T @ outputs).cpu().double()
        self.total += float(weighted[:, 0].sum())


def _solve(
    model: DSparkTrainingModel,
    sums: _Sums,
    scales: torch.Tensor,
    embedding_scale: float,
) -> LinearFit:
    assert sums.total > 0, "an answer has two tokens or more"
    gram = sums.gram / sums.total
    ridge = _RIDGE * torch.eye(len(gram), dtype=torch.float64)
    solution = torch.linalg.solve(gram + ridge, sums.cross / sums.total)
    means = gram[0]
    covariance = gram - torch.outer(means, means)
    t, x = slice(1, 1 + len(scales)), slice(1 + len(scales), None)
    common = torch.linalg.solve(gram[t, t] + ridge[t, t], means[t])

    def put(value: torch.Tensor) -> torch.Tensor:
        return value.to(model.fc.weight)

    return LinearFit(
        put(scales),
        # Of centred taps and embeddings.
        put(means @ solution),
        put(solution[x].T * embedding_scale),
        put(solution[t].T),
        put(covariance[t, t]),
        put(common),
        put(means[x] / embedding_scale),
        put(covariance[x, x] / embedding_scale**2),
    )


def _tabulate_predecessors(model: DSparkTrainingModel, fit: LinearFit) -> None:
    """Give the table the directions in which a predecessor moves y the most."""
    head = model.markov_head
    if head is None:
        return
    moved = (model.embedding - fit.predecessor_mean) @ fit.of_predecessor.T
    covariance = fit.of_predecessor @ fit.predecessor_covariance @ fit.of_predecessor.T
    variances, directions = torch.linalg.eigh(covariance.double())
    best = variances.argsort(descending=True)[: head.markov_w1.weight.shape[1]]
    scales = variances[best].clamp(min=1e-12).sqrt() / _MARKOV_DEVIATION
    directions, scales = directions[:, best].to(moved), scales.to(moved)
    table = moved @ (directions / scales)
    head.markov_w1.weight[:, : len(best)] = table
    if head.kind == "vanilla":
        head.markov_w2.weight[:, : len(best)] = model.head @ (directions * scales)


def _read_taps(model: DSparkTrainingModel, fit: LinearFit) -> torch.Tensor:
    """Make the fused state say what is common, then what the map reads.

    Returns:
        [hidden_size, n]: what dimension 1 + i of the fused state adds to y.
    """
    weight = model.fc.weight
    size = weight.shape[0]
    model.tap_scales = fit.tap_scales
    # What all tokens have in common says nothing: one dimension is enough for it.
    length = fit.common.norm().clamp(min=1e-12)
    weight -= torch.outer(weight @ fit.common, fit.common) / length**2
    weight[0] = fit.common * _COMMON_VALUE
    fitted = fit.of_taps @ fit.covariance @ fit.of_taps.T
    variances, directions = torch.linalg.eigh(fitted.double())
    order = variances.argsort(descending=True)[: int(size * _FITTED_SHARE)]
    order = order[variances[order] > 1e-9 * variances.max()][: size - 1]
    deviations = variances[order].sqrt().to(weight)
    directions = directions[:, order].to(weight)
    reading = (directions.T @ fit.of_taps) / deviations[:, None]
    # Less their means: the constant has them.
    reading -= torch.outer(reading @ fit.common, fit.common) / length**2
    weight[1 : 1 + len(order)] = reading
    return directions * deviations


def _fused_rms(model: DSparkTrainingModel) -> float:
    """Return the root mean square of a fused state before its norm."""
    size = model.fc.weight.shape[0]
    return ((_COMMON_VALUE**2 + size - 1) / size) ** 0.5


def _look_at_the_last_tokens(model: DSparkTrainingModel) -> None:
    """Make most heads look at a fixed distance before their slot, at first.

    A query and a key that are the same for all tokens, but for their rotation, give a
    score that depends on their distance alone.
    """
    config = model.config.backbone
    asking = _constant_reader(model.embedding, model.config.mask_token_id)
    common_value = _COMMON_VALUE / _fused_rms(model)
    half = config.head_dim // 2
    num_pairs = min(_NUM_LOCAL_PAIRS, half)
    cosines, sines = model.cos_sin[1].chunk(2)
    angles = torch.atan2(sines, cosines)[:num_pairs]
    group = config.num_attention_heads // config.num_key_value_heads
    num_free = max(1, config.num_key_value_heads // _LOCAL_SHARE)
    for layer in model.draft_layers:
        attention = layer.self_attn
        is_last = layer is model.draft_layers[-1]
        num_local = config.num_key_value_heads - (0 if is_last else num_free)
        for kv_head in range(num_local):
            first = kv_head * config.head_dim
            keys = attention.k_proj.weight[first : first + config.head_dim]
            keys *= _CONTENT_SHARE
            keys[:, 0] = 0.0
            keys[:num_pairs, 0] = _LOCAL_LENGTH / common_value
            for member in range(group):
                turn = angles * _LOCAL_OFFSETS[member % len(_LOCAL_OFFSETS)]
                first = (kv_head * group + member) * config.head_dim
                queries = attention.q_proj.weight[first : first + config.head_dim]
                queries *= _CONTENT_SHARE
                for start, part in ((0, turn.cos()), (half, -turn.sin())):
                    queries[start : start + num_pairs] += torch.outer(
                        part * _LOCAL_LENGTH, asking
                    )


def _speak(
    model: DSparkTrainingModel,
    fit: LinearFit,
    directions: torch.Tensor,
    norm: torch.Tensor,
) -> None:
    """Make the first heads of the last layer say what the linear map does."""
    config = model.config.backbone
    attention = model.draft_layers[-1].self_attn
    group = config.num_attention_heads // config.num_key_value_heads
    head_dim, rms = config.head_dim, _fused_rms(model)
    norm = torch.where(norm.abs() < _MIN_NORM, _MIN_NORM * norm.sign(), norm)
    norm = torch.where(norm == 0, torch.full_like(norm, _MIN_NORM), norm)
    # What each dimension of the fused state adds to the stream; the first is common.
    written = torch.cat((fit.constant[:, None], directions), dim=1) / norm[:, None]
    num_read = min(written.shape[1], config.num_key_value_heads * head_dim)
    written = written[:, :num_read]
    loudness = written.square().sum(dim=1).mean().sqrt()
    model.norm.weight.copy_(norm * (loudness * _CAUTION))
    written = written * (_VOICE / loudness)
    # The stream begins with the slot's own token, which is to say nothing yet.
    written[:, 0] -= model.embedding[model.config.mask_token_id]
    for kv_head in range(config.num_key_value_heads):
        start = kv_head * head_dim
        dims = range(start, min(start + head_dim, num_read))
        values = attention.v_proj.weight[start : start + len(dims)]
        values.zero_()
        first = kv_head * group * head_dim
        attention.o_proj.weight[:, first : first + head_dim] = 0.0
        for row, dim in enumerate(dims):
            is_common = dim == 0
            values[row, dim] = rms / _COMMON_VALUE if is_common else rms
            attention.o_proj.weight[:, first + row] = written[:, dim]


def _constant_reader(embedding: torch.Tensor, mask_token_id: int) -> torch.Tensor:
    """Return w [size] so that w . x is about 1 for each token's normed embedding x."""
    x = embedding.double()
    x = x * x.square().mean(dim=-1, keepdim=True).clamp(min=1e-12).rsqrt()
    # Most slots hold the mask token: it counts as much as all others.
    mask = x[mask_token_id]
    gram = x.T @ x / len(x) + torch.outer(mask, mask)
    gram += _RIDGE * gram.diagonal().mean() * torch.eye(len(gram), device=x.device)
    target = x.mean(dim=0) + mask
    return torch.linalg.solve(gram, target).to(embedding.dtype)
