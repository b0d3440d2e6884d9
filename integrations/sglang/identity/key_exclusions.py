"""SGLang settings that do not prevent sharing pages with other engines (rule R16).

Some of these settings enter no page key. The others enter only keys that are not shared with other
engines. Any setting that is not listed here enters the key unless it has SGLang's default value
(`sharing.py`).

An entry `Class.name` stands for the setting `name` in an object of the class `Class`. An entry `Class`
stands for the presence of such an object in SGLang's configuration.
"""

from collections.abc import Mapping
from typing import Final

from ...sharing import Exclusions, names_in_classes, names_of
from .environment import OPERATIONAL_VARIABLES, ROUNDING_VARIABLES

RELEASES: Final = ("0.5.23",)
"""The supported SGLang releases.

Before adding a release, run `tests/integrations/sharing` with it. If the release's default settings
compute different KV for some models, list these models as unproven in `kv_description.py`, so that
their keys include the release.
"""

FILES: Final[Mapping[str, str]] = {
    "model": (
        "quantization_param_path rl_quant_profile decrypted_config_file"
        " decrypted_draft_config_file modelopt_checkpoint_restore_path"
    ),
    "exec.moe": "kt_weight_path",
    "exec.dllm": "dllm_algorithm_config",
    "spec": "uno_lora_path speculative_token_map",
}
"""Settings whose values are paths of files, by section of SGLang's configuration. Page keys cover the
files' contents, not the paths."""

OPERATIONAL: Final[Mapping[str, str]] = {
    "model_path revision model_checksum": "The content of the weights, or their commit, is in the key.",
    "speculative_draft_model_path speculative_draft_model_revision": "As above.",
    "download_dir startup_weight_load_mode weight_loader_disable_mmap": "Read files of weights.",
    "weight_loader_prefetch_checkpoints weight_loader_prefetch_num_threads": "As above.",
    "weight_loader_drop_cache_after_load weight_cache_mode weight_cache_socket": "As above.",
    "checkpoint_engine_wait_weights_before_ready weight_version": "Weights need a version with these.",
    "json_model_override_args": "The description has the model's configuration after these.",
    "page_size": "The description has it.",
    "tokenizer_path tokenizer_mode tokenizer_backend tokenizer_worker_num": "Make token ids.",
    "detokenizer_worker_num skip_tokenizer_init chat_template completion_template": "As above.",
    "hf_chat_template_name default_chat_template_kwargs allow_auto_truncate": "As above.",
    "host port fastapi_root_path grpc_mode grpc_port grpc_worker_threads smg_grpc_mode": (
        "Are of the front end."
    ),
    "api_key admin_api_key ssl_keyfile ssl_certfile ssl_ca_certs ssl_keyfile_password": "As above.",
    "served_model_name file_storage_path enable_cache_report tool_server stream_interval": "As above.",
    "tool_call_parser reasoning_parser incremental_streaming_output batch_notify_size": "As above.",
    "skip_server_warmup warmups encoder_transfer_backend": "As above.",
    "enable_return_hidden_states return_hidden_states_mode aux_hidden_state_capture": (
        "Say what is sent back beside tokens."
    ),
    "random_seed sampling_backend grammar_backend sampling_defaults": (
        "Choose the next token, which is in the key."
    ),
    "preferred_sampling_params constrained_json_whitespace_pattern": "As above.",
    "enable_custom_logit_processor enable_tp_lm_head_all_to_all": "As above.",
    "mm_feature_transport mm_preprocess_cache_size_mb mm_io_worker_num": (
        "Bring images, which are in the key by content."
    ),
    "mem_fraction_static max_running_requests max_queued_requests max_total_tokens": (
        "Size memory and batches."
    ),
    "chunked_prefill_size max_prefill_tokens prefill_max_requests enable_mixed_chunk": "As above.",
    "enable_dynamic_chunking swa_full_tokens_ratio _swa_full_tokens_ratio_explicitly_set": "As above.",
    "max_mamba_cache_size mamba_full_memory_ratio pp_max_micro_batch_size": "As above.",
    "expert_distribution_recorder_mode expert_distribution_recorder_buffer_size": "As above.",
    "schedule_policy schedule_conservativeness enable_priority_scheduling retraction_policy": (
        "Order requests."
    ),
    "disable_overlap_schedule num_continuous_decode_steps prefill_decode_interval": "As above.",
    "radix_cache_backend radix_eviction_policy radix_eviction_policy_config": (
        "Find KV again, and keep it on other tiers."
    ),
    "enable_hierarchical_cache hicache_ratio hicache_size hicache_write_policy": "As above.",
    "hicache_host_memory_mode hicache_host_memory_fraction hicache_io_backend": "As above.",
    "hicache_mem_layout hicache_storage_backend hicache_storage_prefetch_policy": "As above.",
    "hicache_storage_backend_extra_config disaggregation_decode_retraction_backup": "As above.",
    "enable_memory_saver enable_weights_cpu_backup cpu_offload_gb offload_mode": (
        "Say where weights lie until they are used."
    ),
    "lora_paths max_loaded_loras max_loras_per_batch lora_eviction_policy": (
        "Say which adapters are in memory."
    ),
    "base_gpu_id gpu_id_step numa_node": "Bind to hardware.",
    "tp_size enable_symm_mem disable_custom_all_reduce enable_nccl_nvls boundary_reduction": (
        "Pages do not depend on the TP size, nor on how ranks add up what each has."
    ),
    "enable_flashinfer_allreduce_fusion flashinfer_allreduce_fusion_backend": "As above.",
    "enable_aiter_allreduce_fusion disable_aiter_allreduce_fusion_in_prefill": "As above.",
    "disable_aiter_allreduce_fusion_in_decode speculative_boundary_reduction": "As above.",
    "enforce_disable_flashinfer_allreduce_fusion enable_torch_symm_mem pre_warm_nccl": "As above.",
    "load_balance_method nccl_port dist_init_addr dist_timeout nnodes node_rank": (
        "Are places of processes, and how they are reached."
    ),
    "watchdog_timeout soft_watchdog_timeout sleep_on_idle": "Are timeouts.",
    "log_level log_level_http log_requests log_requests_level log_requests_format": "Log and measure.",
    "log_requests_target crash_dump_folder show_time_cost decode_log_interval": "As above.",
    "enable_metrics enable_metrics_for_all_schedulers kv_events_config": "As above.",
    "extra_metric_labels enable_request_time_stats_logging": "As above.",
    "enable_trace otlp_traces_endpoint": "As above.",
    "cuda_graph_backend_decode cuda_graph_backend_prefill cuda_graph_max_bs_decode": (
        "`cuda_graph_config` is the result."
    ),
    "cuda_graph_max_bs_prefill cuda_graph_bs_decode cuda_graph_bs_prefill": "As above.",
    "cuda_graph_max_seq_len_prefill cuda_graph_prefill_max_context": "As above.",
    "disable_cuda_graph disable_prefill_cuda_graph disable_decode_cuda_graph": "As above.",
}

OPERATIONAL_IN_CLASSES: Final[Mapping[str, Mapping[str, str]]] = {
    "PhaseConfig": {
        "max_bs bs max_seq_len max_context_size full_prefill_max_req": "Follow from sizes of batches.",
        "full_prefill_prefix_chunk_tokens": "As above.",
    },
}

_KERNELS: Final = "Selects kernels, or how they are compiled."

ROUNDING: Final[Mapping[str, str]] = {
    "device attention_backend decode_attention_backend prefill_attention_backend": _KERNELS,
    "bf16_gemm_backend fp8_gemm_runner_backend fp4_gemm_runner_backend": _KERNELS,
    "moe_runner_backend moe_a2a_backend disable_shared_experts_fusion": _KERNELS,
    "enable_fused_qk_norm_rope triton_attention_num_kv_splits disable_flashinfer_autotune": _KERNELS,
    "enable_torch_compile torch_compile_max_bs disable_cuda_graph_padding cuda_graph_config": _KERNELS,
    "dsa_prefill_backend dsa_decode_backend dsa_topk_backend dsv4_attn_backend": _KERNELS,
    "enable_dsa_fused_indexer speculative_attention_mode speculative_moe_runner_backend": _KERNELS,
    "speculative_moe_a2a_backend speculative_draft_attention_backend": _KERNELS,
    "mamba_radix_cache_strategy uses_mamba_radix_cache mamba_backend linear_attn_backend": (
        "Is of recurrent states, and pages with these are not shared."
    ),
    "linear_attn_decode_backend linear_attn_prefill_backend mamba_ssm_dtype": "As above.",
    "linear_attn_verify_backend mamba_track_interval": "As above.",
    "dtype": "The description has it.",
    "context_length": "Bounds prompts. Positions that depend on it are not shared.",
    "enable_lora lora_backend lora_target_modules max_lora_chunk_size max_lora_rank": (
        "Only requests with an adapter depend on it, and these have it in their keys."
    ),
    "ep_size dcp_comm_backend": "Says how ranks divide and exchange what they have.",
    "disable_chunked_prefix_cache disable_hybrid_swa_memory enable_page_major_kv_layout": (
        "Divides passes and memory."
    ),
    "mm_attention_backend mm_enable_dp_encoder": "Is of the encoder, and items are not shared.",
}

RESOLVED: Final[Mapping[str, object]] = {
    "custom_weight_loader": [],  # The value that SGLang fills in if the user defines no weight loader.
    # The value that SGLang fills in if the user gives no options for image processing.
    "mm_process_config": {},
    # The value that SGLang fills in if the user gives no quantization for the draft model.
    "_speculative_draft_quantization_explicitly_set": False,
    "enable_lora_overlap_loading": False,  # The value that SGLang fills in if there are adapters.
}
"""Values that SGLang fills in for settings whose default is None. Each of them also counts as a
default."""

EXCLUSIONS: Final = Exclusions(
    names_of(OPERATIONAL, OPERATIONAL_VARIABLES) | names_in_classes(OPERATIONAL_IN_CLASSES),
    names_of(ROUNDING, ROUNDING_VARIABLES),
)
