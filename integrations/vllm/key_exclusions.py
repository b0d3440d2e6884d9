"""vLLM settings that do not prevent sharing pages with other engines (rule R16).

Some of these settings enter no page key. The others enter only keys that are not shared with other
engines. Any setting that is not listed here enters the key unless it has vLLM's default value
(`sharing.py`). `Class` without a field is the setting that says whether vLLM's configuration has an
object of this class.
"""

from collections.abc import Mapping
from typing import Final

from ..sharing import Exclusions, names_in_classes, names_of

RELEASES: Final = ("0.32", "0.33")
"""Supported releases of vLLM. Before adding one, run `tests/integrations/sharing` with it.

If the release's default settings compute different KV for some models, list these models as unproven in
`kv_description.py`, so that their keys include the release.
"""

OPERATIONAL: Final[Mapping[str, Mapping[str, str]]] = {
    "VllmConfig": {
        "instance_id kv_transfer_config kv_events_config ec_transfer_config": "Move KV and outputs.",
        "observability_config profiler_config logging_config": "Log, measure and trace.",
        "structured_outputs_config reasoning_config": "Choose the next token, which is in the key.",
        "offload_config": "Says where weights are until they are used.",
        "shutdown_timeout": "Applies at shutdown.",
    },
    "ModelConfig": {
        "model model_weights revision": "The content of the weights, or their commit, is in the key.",
        "hf_config_path hf_overrides": "The description has the model's configuration after these.",
        "tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init": "Make token ids.",
        "hf_token": "Is a secret.",
        "seed max_logprobs logprobs_mode logits_processors": "Apply to sampling.",
        "generation_config override_generation_config": "Are defaults of sampling.",
        "served_model_name renderer_num_workers": "Apply to the front end.",
        "allowed_local_media_path allowed_media_domains": "Images are in the key by content.",
        "enable_sleep_mode": "Says how memory is allocated, so that sleep mode can free it.",
    },
    "CacheConfig": {
        "gpu_memory_utilization kv_cache_memory_bytes num_gpu_blocks_override": "Size memory.",
        "enable_prefix_caching prefix_caching_hash_algo prefix_cache_retention_interval": (
            "Find blocks on the device."
        ),
        "kv_offloading_size kv_offloading_backend": "Move blocks.",
        "block_size": "The description has the page size.",
    },
    "ParallelConfig": {
        "tensor_parallel_size disable_custom_all_reduce": "Pages do not depend on the TP size.",
        "rank node_rank nnodes master_addr master_port": "Place processes.",
        "data_parallel_rank data_parallel_rank_local data_parallel_size_local": "As above.",
        "data_parallel_master_ip data_parallel_master_port data_parallel_rpc_port": "As above.",
        "_data_parallel_master_port_list _coord_store_port": "As above.",
        "_api_process_count _api_process_rank": "As above.",
        "data_parallel_backend data_parallel_external_lb data_parallel_hybrid_lb": (
            "Route requests to equal engines."
        ),
        "distributed_executor_backend placement_group ray_runtime_env": "Start processes.",
        "numa_bind numa_bind_nodes numa_bind_cpus assigned_physical_gpu_ids": "Bind to hardware.",
        "distributed_timeout_seconds cpu_distributed_timeout_seconds": "Are timeouts.",
        "max_parallel_loading_workers": "Bounds memory while weights are loaded.",
    },
    "SchedulerConfig": {
        "max_num_batched_tokens max_num_scheduled_tokens max_num_seqs": "Size batches.",
        "long_prefill_token_threshold policy scheduler_reserve_full_isl": "Order requests.",
        "async_scheduling stream_interval": "Overlap scheduling and output with passes.",
    },
    "LoadConfig": {
        "download_dir safetensors_load_strategy use_tqdm_on_load": "Read files of weights.",
        "device pt_load_map_location": "Say where weights are put first.",
    },
    "LoRAConfig": {"max_loras max_cpu_loras": "Bound how many adapters are in memory."},
    "SpeculativeConfig": {
        "draft_tensor_parallel_size tensor_parallel_size": "Pages do not depend on the TP size.",
    },
    "CompilationConfig": {
        "debug_dump_path cache_dir compile_cache_save_format": "Say where compiled code is kept.",
        "compile_ranges_endpoints cudagraph_capture_sizes": "Follow from the sizes of batches.",
        "max_cudagraph_capture_size cudagraph_num_of_warmups": "As above.",
    },
    "PassConfig": {
        "fuse_allreduce_rms fi_allreduce_fusion_max_size_mb": "Follow from the TP size.",
    },
}

_KERNELS: Final = "Selects kernels, or how they are compiled."

ROUNDING: Final[Mapping[str, Mapping[str, str]]] = {
    "VllmConfig": {
        "device_config kernel_config optimization_level performance_mode": _KERNELS,
        "mamba_config": "Applies to recurrent states, whose pages are not shared.",
    },
    "AttentionConfig": {
        "backend backend_per_kind flash_attn_version use_trtllm_attention": _KERNELS,
        "flash_attn_max_num_splits_for_cuda_graph mla_prefill_backend": _KERNELS,
        "sparse_mla_prefill_workspace_factor": _KERNELS,
    },
    "CacheConfig": {
        "sliding_window": "The description has it.",
        "mamba_ssm_cache_dtype": "As `mamba_config`.",
    },
    "CompilationConfig": {
        "mode backend custom_ops ir_enable_torch_wrap splitting_ops compile_sizes": _KERNELS,
        "inductor_compile_config use_inductor_graph_partition cudagraph_mode": _KERNELS,
        "pass_config dynamic_shapes_config fast_moe_cold_start": _KERNELS,
    },
    "LoRAConfig": {
        "max_lora_rank fully_sharded_loras specialize_active_lora": (
            "Only requests with an adapter depend on it, and their keys have it."
        ),
    },
    "ModelConfig": {
        "dtype": "The description has it.",
        "enforce_eager disable_cascade_attn": _KERNELS,
        "max_model_len": "Bounds prompts. Positions that depend on it are not shared.",
        "enable_prompt_embeds": "Requests that use it are not cached.",
    },
    "ParallelConfig": {
        "is_moe_model": "The description has it.",
        "all2all_backend disable_nccl_for_dp_synchronization dcp_comm_backend": (
            "Says how ranks exchange data."
        ),
        "enable_expert_parallel enable_eplb eplb_config expert_placement_strategy": (
            "Says which rank has which expert."
        ),
        "elastic_ep_max_dp_size": "As above.",
    },
    "SchedulerConfig": {
        "enable_chunked_prefill disable_chunked_mm_input disable_hybrid_kv_cache_manager": (
            "Divides tokens into passes, and memory into groups."
        ),
    },
}

RESOLVED: Final[Mapping[str, object]] = {
    # vLLM replaces None by this value if the user does not set the field.
    "ParallelConfig.enable_batch_sharded_sampling": False,
    # vLLM replaces None by this value if no model sets the field (`set_dcp_defaults`).
    "ParallelConfig.dcp_q_replicate": False,
}
"""Values that vLLM fills in for None, by setting; each of them counts as a default."""

ALWAYS_THERE: Final[Mapping[str, str]] = {
    "ModelConfig LoRAConfig": "Its settings count one by one.",
}

OPERATIONAL_VARIABLES: Final[Mapping[str, str]] = {
    "VLLM_CPU_OMP_THREADS_BIND VLLM_CPU_NUM_OF_RESERVED_CPU VLLM_GPU_NIC_PCIE_MAPPING": (
        "Bind to hardware."
    ),
    "VLLM_DP_RANK VLLM_DP_RANK_LOCAL VLLM_LOOPBACK_IP VLLM_PROCESS_NAME_PREFIX": (
        "Place and name processes."
    ),
    "VLLM_NIXL_SIDE_CHANNEL_PORT VLLM_P2P_SIDE_CHANNEL_HOST VLLM_P2P_SIDE_CHANNEL_PORT": "As above.",
    "VLLM_EC_SIDE_CHANNEL_HOST VLLM_EC_SIDE_CHANNEL_PORT VLLM_MOONCAKE_BOOTSTRAP_PORT": "As above.",
    "VLLM_RAY_PER_WORKER_GPUS VLLM_RAY_BUNDLE_INDICES VLLM_RAY_DP_PLACEMENT_NODE_IPS": "As above.",
    "VLLM_KV_CACHE_LAYOUT": "The order of elements in a page does not depend on it.",
    "VLLM_CONFIGURE_LOGGING VLLM_LOG_BATCHSIZE_INTERVAL VLLM_TRACE_FUNCTION": "Log.",
    "VLLM_ENGINE_READY_TIMEOUT_S VLLM_USAGE_SOURCE": "Apply at start.",
}

ROUNDING_VARIABLES: Final[Mapping[str, str]] = {
    "VLLM_SSM_CONV_STATE_LAYOUT": "As `mamba_config`.",
    "VLLM_DISABLE_SHARED_EXPERTS_STREAM VLLM_USE_FLASHINFER_SAMPLER": _KERNELS,
    "VLLM_BUILD_COMMIT VLLM_BUILD_PIPELINE VLLM_BUILD_URL VLLM_IMAGE_TAG CMAKE_BUILD_TYPE": (
        "Say where it was built and with what."
    ),
    "VLLM_DOCKER_BUILD_CONTEXT VLLM_TARGET_DEVICE VLLM_MAIN_CUDA_VERSION CUDA_HOME": "As above.",
    "NVCC_THREADS VERBOSE VLLM_USE_PRECOMPILED": "As above.",
}

EXCLUSIONS: Final = Exclusions(
    names_in_classes(OPERATIONAL) | names_of(OPERATIONAL_VARIABLES),
    names_in_classes(ROUNDING) | names_of(ROUNDING_VARIABLES, ALWAYS_THERE),
)
