"""DeepSpeed's keys that have no field here: accepted without effect, or refused with a reason."""

from __future__ import annotations

from collections.abc import Mapping


def _with_reasons(keys_by_reason: Mapping[str, str]) -> Mapping[str, str]:
    return {key: reason for reason, keys in keys_by_reason.items() for key in keys.split()}


# Accepted, with a warning that says why they have no effect.
OFFLOAD_OPTIMIZER_IGNORED = _with_reasons({
    'reading and writing always go on beside the update; "buffer_count": 1 is without':
    """
    pipeline_read pipeline_write
    """,
    "first states are made in one streamed pass, which is the only way there is": "fast_init",
})
ZERO_IGNORED = _with_reasons({
    "FSDP2 gathers and reduces group by group, beside the computation":
    """
    allgather_bucket_size allgather_partitions contiguous_gradients overlap_comm
    reduce_bucket_size reduce_scatter round_robin_gradients stage3_allgather_sequential
    stage3_module_granularity_threshold stage3_use_all_reduce_for_fetch_params
    use_all_reduce_for_fetch_params use_multi_rank_bucket_allreduce
    """,
    "the last step's plan decides what is read ahead and what is dropped; "
    '"nvmeswap": {"keep_resident_bytes": ...} keeps shards on the device':
    """
    prefetch_bucket_size stage3_max_live_parameters stage3_max_reuse_distance
    stage3_model_persistence_threshold stage3_param_persistence_threshold
    stage3_prefetch_bucket_size
    """,
    "it is about DeepSpeed's own checkpoints":
    """
    elastic_checkpoint load_from_fp32_weights pipeline_loading_checkpoint
    stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save
    """,
    "it is about DeepSpeed's own modules, optimizers and checks":
    """
    enable_sanity_checks ignore_unused_parameters legacy_stage1 log_trace_cache_warnings
    memory_efficient_linear override_module_apply save_muon_momentum_buffer_in_memory
    """,
})
AIO_IGNORED = _with_reasons({
    "the engine always overlaps submitting with waiting": "overlap_events",
    "ready blocks go to the kernel several at a time": "single_submit",
})
_OTHER_PRECISION = {"FSDP2 casts the inputs of every group": "auto_cast"}
BF16_IGNORED = _with_reasons({
    **_OTHER_PRECISION,
    "bf16 has the range of fp32: nothing is scaled, and overflow shows in the loss":
    """
    check_grad_overflow consecutive_hysteresis hysteresis initial_scale_power loss_scale
    loss_scale_window min_loss_scale
    """,
    "gradients leave for host memory as they come": "immediate_grad_update",
})
FP16_IGNORED = _with_reasons(_OTHER_PRECISION)
# The user's loop reads these itself: no warning.
OUTERMOST_IGNORED = _with_reasons({
    "the user's loop decides it":
    """
    train_batch_size train_micro_batch_size_per_gpu
    """,
    "it is DeepSpeed's own reporting":
    """
    dump_state memory_breakdown steps_per_print wall_clock_breakdown
    """,
    "gradients are averaged by FSDP2, and any elementwise optimizer is served":
    """
    prescale_gradients zero_allow_untested_optimizer zero_force_ds_cpu_optimizer
    """,
})

# Each with what to do instead.
_OVERLAP = 'to update during backward use "nvmeswap": {"overlap_step": true}'
OFFLOAD_OPTIMIZER_REFUSED: Mapping[str, str] = {
    "super_offload": f"SuperOffload is DeepSpeed's; {_OVERLAP}",
    "zenflow": f"ZenFlow is DeepSpeed's; {_OVERLAP}",
}
ZERO_REFUSED: Mapping[str, str] = {
    "zenflow": f"ZenFlow is DeepSpeed's; {_OVERLAP}",
    "cpu_offload": 'use "offload_optimizer": {"device": "cpu"}',
    "cpu_offload_param": 'use "offload_param": {"device": "cpu"}',
    "cpu_offload_use_pin_memory": 'use "pin_memory" in "offload_optimizer"',
    "mics_shard_size": "pass a 2-D mesh to shard() instead",
    "mics_hierarchical_params_gather": "pass a 2-D mesh to shard() instead",
    "zero_hpz_partition_size": "pass a 2-D mesh to shard() instead",
    "zero_quantized_weights": "quantised communication is not served",
    "zero_quantized_nontrainable_weights": "quantised communication is not served",
    "zero_quantized_gradients": "quantised communication is not served",
    "zeropp_loco_param": "quantised communication is not served",
}
PRECISION_REFUSED: Mapping[str, str] = {
    "bf16_master_weights_and_grads": "masters are always fp32; leave the key out",
    "bf16_optimizer_states": "optimizer state is always fp32; leave the key out",
    "fp16_master_weights_and_grads": "masters are always fp32; leave the key out",
}
OUTERMOST_REFUSED: Mapping[str, str] = {
    "scheduler": "build a torch.optim.lr_scheduler over the optimizer that shard() returns",
    "amp": 'use "bf16": {"enabled": true}',
    "communication_data_type": "reductions are in fp32",
    "gradient_predivide_factor": "FSDP2 divides gradients by the world size",
    "sparse_gradients": "build embeddings with sparse=False",
}

# Values of keys without effect that ask for what is done anyway: no warning.
AS_IT_IS: Mapping[str, bool] = {
    "allgather_partitions": True,
    "auto_cast": True,
    "contiguous_gradients": True,
    "elastic_checkpoint": False,
    "fast_init": False,
    "legacy_stage1": False,
    "overlap_comm": True,
    "overlap_events": True,
    "pipeline_read": True,
    "pipeline_write": True,
    "reduce_scatter": True,
    "single_submit": False,
}

# Values of refused keys that ask for nothing, beside null, false, 0 and "auto".
INERT: Mapping[str, float] = {
    "gradient_predivide_factor": 1.0,
    "mics_shard_size": -1,
    "zero_hpz_partition_size": 1,
}
