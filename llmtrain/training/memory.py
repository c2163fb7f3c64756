"""How much memory a training process needs, part by part, for each ZeRO stage. Pure arithmetic on a config.

Every term stands for tensors that were found in torch 2.13 and DeepSpeed 0.19.8 and whose sum was compared with the
measured growth of processes (`llmtrain bench "which=[training-memory]"`). Knows DeepSpeed's buffers and gloo's copies;
nothing of which device it is, of its size, or of settings files.

P parameters, N processes, M numbers that the optimiser keeps, w bytes of a weight (4 in fp32, 2 in bf16), R = min(P,
bucket) elements that are reduced at a time. Shapes: B batch, T time, C hidden, H heads, K key/value heads, D head size,
V vocabulary, I intermediate size, L layers.

| bytes | one process without DeepSpeed | ZeRO 1 | ZeRO 2 | ZeRO 3 |
|---|---|---|---|---|
| weights | 4·P: bf16 is autocast over fp32 weights | w·P | w·P | w·P/N |
| gradients | 4·P | fp32: 4·P; bf16: 2·P of backward and 4·P they are summed in, whole | 4·P/N | 4·P/N |
| optimizer | 4·M | 4·(P + M)/N: master weights, in fp32 runs too, as a flat copy | the same | the same |
| buffers | bf16: 2 for each weight of a matrix, cast | see `_reduction` | | |
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from llmtrain.model import ModelConfig, moment_count, parameter_count
from llmtrain.model.accounting import BYTES, layer_matrix_parameters
from llmtrain.model.loss import LOGITS_BUDGET_BYTES
from llmtrain.training.deepspeed.config import BUCKET_ELEMENTS

HEAP_BLOCK = 32 << 20
"""glibc takes blocks below this from heaps, where what is freed between others stays; larger ones go back at once."""

HEAP_SHARES = (0.20, 0.05)
"""What heaps hold beyond the sum of the parts, as a share of it: where matrices are allocated one by one (without
DeepSpeed and under ZeRO 3) or a process's share of them is such a block, and where not. Measured: 5 to 33 %, and −9 to
14 %, as some parts never meet. With heaps switched off (`MALLOC_MMAP_THRESHOLD_=1000000`, which costs a sixth of the
speed) the tensors alone are predicted within 7 %."""

_ALLREDUCE_BUCKET = 500_000_000  # of BF16_Optimizer (bf16, ZeRO 1), which no setting reaches


@dataclass(frozen=True)
class Workload:
    """What one process is given to do, as far as memory goes.

    Attributes:
        config: the model's shape.
        micro_batch_size: B, rows that one process runs at a time.
        sequence_length: T.
        optimizer: `adamw` or `muon`.
        gradient_checkpointing: only each layer's input is kept, and one layer at a time recomputed.
        grad_accum_dtype: in which a bf16 run under DeepSpeed sums gradients.
        offload_optimizer: the optimiser's share and the gradients' share it updates from lie in host memory.
        offload_parameters: and the weights' share, under ZeRO 3.
    """

    config: ModelConfig
    micro_batch_size: int
    sequence_length: int
    optimizer: str = "adamw"
    gradient_checkpointing: bool = False
    grad_accum_dtype: str = "fp32"
    offload_optimizer: bool = False
    offload_parameters: bool = False

    @property
    def tokens(self) -> int:
        """B·T."""
        return self.micro_batch_size * self.sequence_length


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes of one process above what it has before there is a model.

    The parts are added as if all were there at once. Nearly all are: what backward has freed of the activations stays
    with the allocator while gradients and buckets come.

    Attributes:
        weights: as they are computed with.
        gradients: all that is kept of them from one micro-batch to the next.
        optimizer: its moments, and the fp32 master weights under DeepSpeed.
        activations: what the layers keep for backward.
        logits: what the loss keeps and needs for backward.
        buffers: there in passing: reduction buckets, gathered layers, copies at the update.
        allocator: what the C library's allocator holds beyond what is asked of it; 0 on a GPU.
        saving: what rank 0 needs beyond all that while it writes a model folder, when activations, logits and buffers
            have gone: the fp32 weights three times (gathered, stored, as safetensors' bytes). 0 on a GPU.
        host: in the host's memory beside a GPU: rank 0's copies while it saves, and an offloaded optimiser.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    buffers: int
    allocator: int = 0
    saving: int = 0
    host: int = 0

    @property
    def state(self) -> int:
        """What is there for the whole run."""
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        """The peak on the device; all parts but `host` together."""
        return self.state + self.activations + self.logits + self.buffers + self.allocator + self.saving

    def to_dict(self) -> dict[str, int]:
        """All parts and the total."""
        return {field.name: getattr(self, field.name) for field in fields(self)} | {"total": self.total}


def training_memory(
    work: Workload, *, precision: str = "bf16", zero_stage: int = 1, world_size: int = 1, on_cpu: bool = True
) -> TrainingMemory:
    """Memory of one training process; the terms are explained at the top of this file.

    Args:
        work: what it is given to do.
        precision: `fp32` or `bf16`.
        zero_stage: 1, 2 or 3; 0 is one process without DeepSpeed, which offloads nothing.
        world_size: N.
        on_cpu: CPU processes, in whose memory only pages count that were written to; a GPU takes buckets whole.

    Returns:
        Bytes by part.
    """
    config = work.config
    count, moments = parameter_count(config), moment_count(config, work.optimizer)
    width = BYTES[precision] if zero_stage else 4
    summed = BYTES[work.grad_accum_dtype] if precision == "bf16" else 4
    share = world_size if zero_stage else 1
    gradients = {
        0: 4 * count,
        1: summed * count + (2 * count if precision == "bf16" else 0),
        2: summed * count // share,
        3: summed * count // share,
    }[zero_stage]
    states = 4 * (moments + (count if zero_stage else 0)) // share
    weights = width * count // (share if zero_stage == 3 else 1)
    tables = config.vocab_size * config.hidden_size
    in_heaps = on_cpu and (zero_stage in (0, 3) or 4 * max(count - tables, tables) // share < HEAP_BLOCK)
    buffers = _reduction(config, precision, zero_stage, world_size, on_cpu=on_cpu, summed=summed)
    if work.optimizer == "muon":
        update = _muon_update(config, share, BYTES[precision])
        # ZeRO 2 fills its buckets while heaps, if they gave the update its blocks, still hold them.
        held = zero_stage == 2 and in_heaps and BYTES[precision] * (count - tables) < HEAP_BLOCK
        buffers = buffers + update if held else max(buffers, update)
    if config.tie_word_embeddings:  # the table has two gradients, of the head and of the look-up, before their sum
        buffers += 2 * width * tables
    host = 0
    if zero_stage and work.offload_optimizer:  # on a CPU the same memory
        states += 4 * count // share  # the gradients' share that the update reads
        gradients = gradients if zero_stage == 1 else 0
        host, states = (0, states) if on_cpu else (states, 0)
    if zero_stage == 3 and work.offload_parameters and not on_cpu:
        host, weights = host + weights, 0
    parts = {
        "weights": weights,
        "gradients": gradients,
        "optimizer": states,
        "activations": _activations(work, precision, zero_stage, on_cpu=on_cpu),
        "logits": _logits(config, work.tokens),
        "buffers": buffers,
    }
    copies, used = 12 * count, sum(parts.values())
    if not on_cpu:
        return TrainingMemory(**parts, host=host + copies)
    allocator = int(HEAP_SHARES[0 if in_heaps else 1] * used)
    # Between steps DeepSpeed keeps gradients only where it has a buffer of its own for all of them.
    kept = gradients if zero_stage in (0, 3) or (zero_stage == 1 and precision == "bf16") else 0
    state = parts["weights"] + parts["optimizer"] + kept
    return TrainingMemory(**parts, allocator=allocator, saving=max(0, state + copies - used - allocator))


def _reduction(
    config: ModelConfig, precision: str, zero_stage: int, world_size: int, *, on_cpu: bool, summed: int
) -> int:
    """Bytes of the buffers that come and go while gradients are reduced and weights gathered.

    * Without DeepSpeed: autocast's bf16 copies of the matrices, kept until backward has used them.
    * ZeRO 1 in fp32: several CPU processes flatten all gradients of a bucket for the all-reduce (R); one process
      flattens its largest optimiser group at the update. On a GPU a bucket and its flat copy, as ZeRO 2.
    * ZeRO 1 in bf16 (DeepSpeed's BF16_Optimizer): a flat copy of the summed gradients for the all-reduce, up to 500 M.
    * ZeRO 2: the bucket that gradients are copied into, and its flat copy, which is there before this process's share
      is: 4·R·(2 − 1/N) in fp32. In bf16 the share is there first, and the copy is bf16 and fp32: (2 + 2 + 4)·R.
    * ZeRO 3: the bucket stays (4·R). In backward two more such copies, one to interleave the shares and one inside
      gloo's reduce-scatter, beside the gathered weights of about half the layers; or, in forward, all weights gathered
      (up to 10⁹ are let live) and one prefetch being unpacked, whichever is more. One process gathers nothing.
    """
    count = parameter_count(config)
    whole = BUCKET_ELEMENTS if not on_cpu else min(count, BUCKET_ELEMENTS)  # untouched pages are not resident
    reduced = min(count, BUCKET_ELEMENTS)
    tables = config.vocab_size * config.hidden_size
    if zero_stage == 0:
        head = tables  # tied or not, the output layer multiplies with it
        matrices = config.num_hidden_layers * layer_matrix_parameters(config) + head
        return 2 * matrices if precision == "bf16" else 0
    if zero_stage == 1 and precision == "bf16":
        return summed * min(count, _ALLREDUCE_BUCKET) if world_size > 1 else 0
    if zero_stage == 1 and on_cpu:
        return 4 * (reduced if world_size > 1 else max(count - tables, tables))
    buckets = 1 if on_cpu else 2  # on a GPU one is filled while the other is reduced
    if zero_stage < 3:
        if precision == "bf16":
            return 2 * buckets * whole + (2 + summed) * reduced
        return 4 * buckets * whole + (4 * reduced * (world_size - 1) // world_size)
    scatter = (2 if on_cpu else 1) * summed * reduced
    live = BYTES[precision] * min(count, 10**9) if world_size > 1 else 0
    prefetch = BYTES[precision] * reduced if world_size > 1 else 0
    return summed * whole + max(scatter + live // 2, live + prefetch)


def _muon_update(config: ModelConfig, share: int, width: int) -> int:
    """Bytes of Muon's update: the Nesterov momentum, gathered if it is sharded, and the largest batch of one shape.

    A batch (gate and up of all layers) is there as its scaled fp32 copy, twice as iterate in the precision of the
    products, and as the fp32 result. A sharded run only takes the matrices that its slice touches.
    """
    hidden = config.num_hidden_layers * layer_matrix_parameters(config)
    batch = min(2 * config.num_hidden_layers * config.hidden_size * config.intermediate_size, hidden // share)
    gathered = width * (hidden + hidden // share) if share > 1 else 0
    return 4 * hidden // share + gathered + (8 + 2 * width) * batch


def _activations(work: Workload, precision: str, zero_stage: int, *, on_cpu: bool) -> int:
    """Bytes that the layers keep for backward, as counted by hooks on what autograd saves.

    Per token and layer: queries and the attention's output (2·H·D), keys and values (2·K·D), the four tensors of SwiGLU
    (4·I) and the two normalised inputs (2·C) in the dtype of the products; for each of the two norms on a CPU its input
    and its scaled input in fp32, on a GPU (whose kernel is fused) its input alone; 4 for each head's log-sum-exp.
    Autocast casts a normalised input once for each matrix that reads it (5·C, not 2·C). The last norm is one more.
    """
    config, tokens = work.config, work.tokens
    hidden, width = config.hidden_size, BYTES[precision]
    autocast = zero_stage == 0 and precision == "bf16"
    heads = config.head_dim * (config.num_attention_heads + config.num_key_value_heads)
    norm = 8 * hidden + 4 if on_cpu else (4 if autocast else width) * hidden + 4
    inputs = (5 if autocast else 2) * hidden
    layer = width * (2 * heads + 4 * config.intermediate_size + inputs) + 2 * norm + 4 * config.num_attention_heads
    last = norm + width * hidden
    if work.gradient_checkpointing:
        stream = (4 if autocast else width) * hidden
        return tokens * (config.num_hidden_layers * stream + layer + last)
    return tokens * (config.num_hidden_layers * layer + last)


def _logits(config: ModelConfig, tokens: int) -> int:
    """Bytes of the loss at its peak: log-probabilities, their gradient and the logits' gradient, fp32, 12·V per token.

    Above a budget `loss_sum` takes tokens in chunks, whose logits are recomputed.
    """
    return 3 * min(4 * config.vocab_size * tokens, LOGITS_BUDGET_BYTES)
