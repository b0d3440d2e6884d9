"""What vLLM can be configured with that changes no byte of KV: all else is part of every key.

Each entry has its reason, as it was read in the releases of vLLM that `READ_IN` names, which are those
that the plug-in is for. A field that is not here is in the key. A test (`test_engine_fields.py`) fails
for a field of vLLM's that is neither here nor among those that are known to be in the key.

A reason is one of what vLLM does, not of what is likely: which numbers a token's KV consists of must
follow from the tokens before it and from what is in the key. Sums that are added up in another order
are the same sums: groups of different TP sizes share pages.
"""

from collections.abc import Mapping
from typing import Final

from ..proven_out import names_by_owner

READ_IN: Final = ("0.32", "0.33")

_CONFIG: Final = "vllm.config"

PROVEN_OUT: Final[Mapping[str, Mapping[str, str]]] = {
    f"{_CONFIG}.vllm.VllmConfig": {
        "instance_id kv_transfer_config kv_events_config ec_transfer_config": (
            "They say between whom KV and the outputs of encoders are moved, and how; what a user gives"
            " to this connector about the model is in the key by itself."
        ),
        "observability_config profiler_config logging_config watchdog_config": (
            "They watch, and change nothing."
        ),
        "structured_outputs_config reasoning_config watermark_config": (
            "They choose among the logits of the next token, whose id is in the key."
        ),
        "offload_config": "It says where weights lie until they are used, not what they are.",
        "shutdown_timeout": "It begins where serving ends.",
    },
    f"{_CONFIG}.model.ModelConfig": {
        "model model_weights hf_config_path hf_overrides revision": (
            "What is loaded counts by its content or its commit, and `hf_config` is in the key as it is"
            " after every override."
        ),
        "tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init hf_token": (
            "They bring token ids about, and every page's key has these."
        ),
        "seed max_logprobs logprobs_mode return_sampling_mask use_fp64_gumbel logits_processors": (
            "They serve sampling. Dummy weights count by the seed on their own."
        ),
        "generation_config override_generation_config": "Defaults of sampling parameters.",
        "served_model_name io_processor_plugin renderer_num_workers": (
            "They belong to the front end, before there are token ids."
        ),
        "allowed_local_media_path allowed_media_domains": (
            "They say what may be fetched; what was fetched is in the key by its hash."
        ),
        "enable_sleep_mode sleep_preserve_parameter_names sleep_mode_backend": (
            "They say what becomes of memory while no request runs; KV is given up there."
        ),
        "sleep_mode_offload_cudagraph enable_nccl_comm_suspend enable_cumem_allocator": (
            "As above: allocators and communicators, and not what is computed."
        ),
        "original_max_model_len": "What the user wrote; `max_model_len` is what came of it.",
    },
    f"{_CONFIG}.cache.CacheConfig": {
        "gpu_memory_utilization kv_cache_memory_bytes num_gpu_blocks_override num_gpu_blocks": (
            "How many blocks there are; one block's content does not depend on the others' number."
        ),
        "num_cpu_blocks kv_cache_size_tokens kv_cache_max_concurrency": "As above.",
        "enable_prefix_caching prefix_caching_hash_algo prefix_cache_retention_interval": (
            "They find blocks again on the device, and leave their content alone."
        ),
        "kv_offloading_size kv_offloading_backend simple_cpu_offload_num_blocks": (
            "They move blocks."
        ),
        "kv_cache_layout": (
            "In which order blocks, layers, heads and tokens lie in memory; a page has one order, and"
            " what a token's content consists of follows from the backend and its variables."
        ),
    },
    f"{_CONFIG}.parallel.ParallelConfig": {
        "tensor_parallel_size world_size rank disable_custom_all_reduce": (
            "TP size is no part of a page: ranks of any size find their heads in it."
        ),
        "data_parallel_size_local data_parallel_rank data_parallel_rank_local data_parallel_index": (
            "Which of equal engines this is; each has requests of its own."
        ),
        "data_parallel_master_ip data_parallel_rpc_port data_parallel_master_port": (
            "Addresses of processes."
        ),
        "master_addr master_port node_rank nnodes _data_parallel_master_port_list": "As above.",
        "_coord_store_port _api_process_count _api_process_rank data_parallel_backend": "As above.",
        "data_parallel_external_lb data_parallel_hybrid_lb dp_sync_interval": (
            "They divide requests among engines."
        ),
        "ray_workers_use_nsight ray_runtime_env placement_group distributed_executor_backend": (
            "They start processes."
        ),
        "numa_bind numa_bind_nodes numa_bind_cpus assigned_physical_gpu_ids": (
            "They say on which processor of the host a rank runs."
        ),
        "distributed_timeout_seconds cpu_distributed_timeout_seconds": "They end what hangs.",
        "max_parallel_loading_workers enable_shm_tensor_arena": (
            "They bound memory while weights are loaded and tensors are sent."
        ),
        "enable_fault_tolerance fault_tolerance_config": "They act where a rank has failed.",
    },
    f"{_CONFIG}.scheduler.SchedulerConfig": {
        "max_num_batched_tokens max_num_scheduled_tokens max_num_seqs max_num_active_seqs": (
            "They say which requests share a pass; a token attends to its own request alone."
        ),
        "long_prefill_token_threshold long_prefill_token_threshold_adaptive": "As above.",
        "policy scheduler_reserve_full_isl watermark prefill_schedule_interval": "As above.",
        "max_num_queued_reqs max_num_queued_tokens async_scheduling stream_interval": (
            "They say when a request runs and when its output is sent."
        ),
        "max_num_encoder_input_tokens encoder_cache_size": (
            "How many outputs of encoders are kept; what is not kept is computed again."
        ),
    },
    f"{_CONFIG}.device.DeviceConfig": {
        "device": "Which of its host's devices a rank has; their type is in the key.",
    },
    f"{_CONFIG}.load.LoadConfig": {
        "download_dir safetensors_load_strategy safetensors_prefetch_num_threads device": (
            "They say how files of weights are read, whose content is in the key."
        ),
        "safetensors_prefetch_block_size use_tqdm_on_load pt_load_map_location": "As above.",
    },
    f"{_CONFIG}.lora.LoRAConfig": {
        "max_loras max_cpu_loras": "How many adapters are in memory at once.",
    },
    f"{_CONFIG}.speculative.SpeculativeConfig": {
        "draft_tensor_parallel_size tensor_parallel_size": (
            "TP size is no part of a page; see `ParallelConfig`."
        ),
    },
    f"{_CONFIG}.compilation.CompilationConfig": {
        "debug_dump_path cache_dir local_cache_dir compile_cache_save_format": (
            "They say where compiled code is kept."
        ),
        "traced_files compilation_time encoder_compilation_time": (
            "What compiling has come to in this process; from a cache it comes to something else."
        ),
        "enabled_custom_ops disabled_custom_ops static_forward_context static_all_moe_layers": (
            "What the model's layers have entered; they follow from the model and `custom_ops`."
        ),
        "compile_ranges_endpoints cudagraph_capture_sizes max_cudagraph_capture_size": (
            "For batches of which sizes there is code of its own; they follow from the scheduler's."
        ),
        "cudagraph_num_of_warmups": "It runs before the first request.",
    },
    f"{_CONFIG}.compilation.PassConfig": {
        "fuse_allreduce_rms fi_allreduce_fusion_max_size_mb": (
            "They follow from the TP size, which is no part of a page; see `ParallelConfig`."
        ),
    },
    "transformers.configuration_utils.PreTrainedConfig": {
        "_name_or_path transformers_version": (
            "Where it was read from and who wrote it; what it says is in the key."
        ),
    },
}

ENVIRONMENT_PROVEN_OUT: Final[Mapping[str, str]] = {
    "VLLM_CPU_OMP_THREADS_BIND VLLM_CPU_NUM_OF_RESERVED_CPU VLLM_GPU_NIC_PCIE_MAPPING": (
        "They say on which processors of the host a rank runs."
    ),
    "VLLM_DP_RANK VLLM_DP_RANK_LOCAL VLLM_LOOPBACK_IP VLLM_PROCESS_NAME_PREFIX": (
        "They name processes and their addresses."
    ),
    "VLLM_NIXL_SIDE_CHANNEL_PORT VLLM_P2P_SIDE_CHANNEL_HOST VLLM_P2P_SIDE_CHANNEL_PORT": "As above.",
    "VLLM_EC_SIDE_CHANNEL_HOST VLLM_EC_SIDE_CHANNEL_PORT VLLM_MOONCAKE_BOOTSTRAP_PORT": "As above.",
    "VLLM_RAY_PER_WORKER_GPUS VLLM_RAY_BUNDLE_INDICES VLLM_RAY_DP_PLACEMENT_NODE_IPS": (
        "They say where Ray starts processes."
    ),
    "VLLM_KV_CACHE_LAYOUT": "It asks for a `kv_cache_layout`.",
    "VLLM_CONFIGURE_LOGGING VLLM_LOG_BATCHSIZE_INTERVAL VLLM_TRACE_FUNCTION": "They watch.",
    "VLLM_ENGINE_READY_TIMEOUT_S VLLM_USAGE_SOURCE": "They serve the start, and statistics of use.",
}


def left_out() -> dict[str, frozenset[str]]:
    """Return the names of the fields that are proven out, by class."""
    return names_by_owner(PROVEN_OUT)
