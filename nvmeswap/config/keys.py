"""DeepSpeed's keys that have no field here: accepted without effect, or refused with a reason."""

from __future__ import annotations

from collections.abc import Mapping

# What they tune is FSDP2's own, or the user's loop decides it.
OFFLOAD_OPTIMIZER_IGNORED = frozenset(
    """
    fast_init pipeline_read pipeline_write
    """.split()
)
ZERO_IGNORED = frozenset(
    """
    allgather_bucket_size allgather_partitions contiguous_gradients elastic_checkpoint
    enable_sanity_checks ignore_unused_parameters legacy_stage1 load_from_fp32_weights
    log_trace_cache_warnings memory_efficient_linear overlap_comm override_module_apply
    pipeline_loading_checkpoint prefetch_bucket_size reduce_bucket_size reduce_scatter
    round_robin_gradients save_muon_momentum_buffer_in_memory stage3_allgather_sequential
    stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save
    stage3_max_live_parameters stage3_max_reuse_distance stage3_model_persistence_threshold
    stage3_module_granularity_threshold stage3_param_persistence_threshold
    stage3_prefetch_bucket_size stage3_use_all_reduce_for_fetch_params
    use_all_reduce_for_fetch_params use_multi_rank_bucket_allreduce
    """.split()
)
AIO_IGNORED = frozenset(
    """
    overlap_events single_submit
    """.split()
)
PRECISION_IGNORED = frozenset(
    """
    auto_cast check_grad_overflow consecutive_hysteresis hysteresis immediate_grad_update
    initial_scale_power loss_scale loss_scale_window min_loss_scale
    """.split()
)
OUTERMOST_IGNORED = frozenset(
    """
    dump_state gradient_accumulation_steps memory_breakdown prescale_gradients steps_per_print
    train_batch_size train_micro_batch_size_per_gpu wall_clock_breakdown
    zero_allow_untested_optimizer zero_force_ds_cpu_optimizer
    """.split()
)

# Each with what to do instead.
OFFLOAD_OPTIMIZER_REFUSED: Mapping[str, str] = {
    "super_offload": "SuperOffload is DeepSpeed's; leave the key out",
    "zenflow": "ZenFlow is DeepSpeed's; leave the key out",
}
ZERO_REFUSED: Mapping[str, str] = {
    "zenflow": "ZenFlow is DeepSpeed's; leave the key out",
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
AIO_REFUSED: Mapping[str, str] = {"use_gds": "GPUDirect Storage is not built yet"}
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

# Values of refused keys that ask for nothing, beside null, false, 0 and "auto".
INERT: Mapping[str, float] = {
    "gradient_predivide_factor": 1.0,
    "mics_shard_size": -1,
    "zero_hpz_partition_size": 1,
}
