"""What SGLang can be configured with that changes no byte of KV: all else is part of every key.

Each entry has its reason, as it was read in the releases of SGLang that `READ_IN` names, which are
those that the plug-in is for. A field that is not here is in the key. A test (`test_engine_fields.py`)
fails for a field of the installed SGLang that is neither here nor among those that are known to be in
the key.

A reason is one of what SGLang does, not of what is likely: which numbers a token's KV consists of must
follow from the tokens before it and from what is in the key. Sums that are added up in another order
are the same sums: groups of different TP sizes share pages. Which kernels compute attention and
matrices stays in the key, as they round in other places.
"""

from collections.abc import Mapping
from typing import Final

READ_IN: Final = ("0.5.23",)

FILES: Final[Mapping[str, str]] = {
    "model": (
        "quantization_param_path rl_quant_profile decrypted_config_file"
        " decrypted_draft_config_file modelopt_checkpoint_restore_path"
    ),
    "exec.moe": "kt_weight_path",
    "exec.dllm": "dllm_algorithm_config",
    "spec": "uno_lora_path speculative_token_map",
}
"""Fields that name files, by namespace. What the files hold counts with the weights, not the name."""

_AS_ABOVE: Final = "As above."

FIELDS_PROVEN_OUT: Final[Mapping[str, Mapping[str, str]]] = {
    "device": {
        "base_gpu_id gpu_id_step numa_node use_ray": "They say on which device a rank runs.",
        "random_seed mlx_enable_sampling": (
            "They serve sampling; where no seed is given, each start draws one."
        ),
        "watchdog_timeout soft_watchdog_timeout custom_sigquit_handler": "They end what hangs.",
        "sleep_on_idle gc_threshold": "They say when a process rests or collects its garbage.",
    },
    "disagg": {
        "disaggregation_mode disaggregation_decode_allocation_policy enable_pd_role_switch": (
            "They say between whom KV is moved, and when; what it consists of stays as it is."
        ),
        "disaggregation_transfer_backend disaggregation_enable_kv_checksum": _AS_ABOVE,
        "disaggregation_bootstrap_port disaggregation_ib_device optimistic_prefill_attempts": (
            _AS_ABOVE
        ),
        "disaggregation_decode_enable_radix_cache disaggregation_decode_enable_offload_kvcache": (
            _AS_ABOVE
        ),
        "disaggregation_decode_retraction_backup disaggregation_decode_polling_interval": _AS_ABOVE,
        "num_reserved_decode_tokens disaggregation_decode_extra_slots": "How much room there is.",
        "disaggregation_decode_host_receive_threshold": _AS_ABOVE,
        "decoupled_spec_bind_endpoint decoupled_spec_connect_endpoints decoupled_spec_rank": (
            "Addresses of processes."
        ),
        "encoder_transfer_backend encoder_urls encoder_bootstrap_port encoder_register_urls": (
            "They say from whom the outputs of encoders come, and how."
        ),
        "enable_adaptive_dispatch_to_encoder": _AS_ABOVE,
    },
    "exec.comm": {
        "enable_nccl_nvls enable_symm_mem disable_custom_all_reduce enable_mscclpp": (
            "They say how ranks add up what each has; the sums are the same."
        ),
        "enable_torch_symm_mem pre_warm_nccl boundary_reduction": _AS_ABOVE,
        "enable_flashinfer_allreduce_fusion enforce_disable_flashinfer_allreduce_fusion": (
            "They follow from the TP size, which is no part of a page; see `parallel`."
        ),
        "flashinfer_allreduce_fusion_backend enable_aiter_allreduce_fusion": _AS_ABOVE,
        "disable_aiter_allreduce_fusion_in_prefill disable_aiter_allreduce_fusion_in_decode": (
            _AS_ABOVE
        ),
        "enable_layerwise_nvtx_marker": "It watches, and changes nothing.",
    },
    "exec.features": {
        "enable_memory_saver enable_weights_cpu_backup enable_draft_weights_cpu_backup": (
            "They say what becomes of memory while no request runs; KV is given up there."
        ),
        "enable_fp32_lm_head enable_custom_logit_processor sampling_mask_max_tokens": (
            "They choose the next token, whose id is in the key."
        ),
        "enable_watermark watermark_config watermark_key watermark_key_b": _AS_ABOVE,
        "watermark_context_window watermark_mixing_probability watermark_max_probability": _AS_ABOVE,
        "watermark_default_enabled watermark_enforce_all disable_outlines_disk_cache": _AS_ABOVE,
        "enable_return_hidden_states return_hidden_states_mode enable_return_routed_experts": (
            "They say what is sent back beside tokens."
        ),
        "enable_return_indexer_topk": _AS_ABOVE,
    },
    "exec.graph": {
        "cuda_graph_backend_decode cuda_graph_backend_prefill cuda_graph_max_bs_decode": (
            "What the user wrote; `cuda_graph_config` is what came of it."
        ),
        "cuda_graph_max_bs_prefill cuda_graph_max_seq_len_prefill cuda_graph_bs_decode": _AS_ABOVE,
        "cuda_graph_bs_prefill disable_prefill_cuda_graph disable_decode_cuda_graph": _AS_ABOVE,
        "disable_cuda_graph": _AS_ABOVE,
        "cuda_graph_prefill_max_context": "For which batches there is a graph.",
        "enable_profile_cuda_graph enable_cudagraph_gc": "They watch and time how graphs are made.",
    },
    "exec.kernel": {
        "sampling_backend grammar_backend": "They choose the next token, whose id is in the key.",
    },
    "exec.mamba": {
        "int8_mamba_ckpt_size mamba_max_states_per_path": "How many states are kept.",
    },
    "exec.moe": {
        "expert_distribution_recorder_mode expert_distribution_recorder_buffer_size": (
            "They watch, and change nothing."
        ),
        "expert_balancedness_report_mode": _AS_ABOVE,
        "mooncake_ib_device elastic_ep_scale_timeout": "They say how ranks reach each other.",
        "kt_cpuinfer kt_threadpool_count": "How many threads compute.",
    },
    "exec.offload": {
        "cpu_offload_gb offload_group_size offload_num_in_group offload_prefetch_step": (
            "They say where weights lie until they are used, not what they are."
        ),
        "offload_mode ple_offload_embedding ple_offload_backend ple_offload_dir": _AS_ABOVE,
    },
    "lora": {
        "lora_paths": "What an adapter is counts by its weights, for the requests that ask for it.",
        "max_loaded_loras max_loras_per_batch lora_eviction_policy": (
            "How many adapters are in memory at once, and which."
        ),
        "enable_lora_overlap_loading lora_drain_wait_threshold": (
            "They say when an adapter's weights are brought to the device."
        ),
    },
    "memory": {
        "radix_eviction_policy radix_eviction_policy_config disable_radix_cache": (
            "They find KV again on the device or drop it, and leave its content alone."
        ),
        "_radix_eviction_policy_explicitly_set enable_session_radix_cache": _AS_ABOVE,
        "radix_cache_backend enable_hierarchical_cache hicache_host_memory_mode hicache_ratio": (
            "They keep KV on other tiers, and bring it back as it was."
        ),
        "hicache_size hicache_host_memory_fraction hicache_write_policy hicache_io_backend": (
            _AS_ABOVE
        ),
        "hicache_mem_layout hicache_storage_backend hicache_storage_prefetch_policy": _AS_ABOVE,
        "hicache_storage_backend_extra_config enable_unified_cache_external_linker": _AS_ABOVE,
        "hicache_storage_prefetch_retry_poll_interval": _AS_ABOVE,
        "hicache_storage_prefetch_retry_max_attempts enable_linker_mla_dedup": _AS_ABOVE,
        "unified_cache_external_linker_backend unified_cache_external_linker_config": _AS_ABOVE,
        "enable_lmcache lmcache_config_file enable_flexkv flexkv_config_file": _AS_ABOVE,
    },
    "mm": {
        "enable_broadcast_mm_inputs_process mm_feature_transport mm_processor_worker_num": (
            "They say how inputs reach a rank, and how many threads prepare them."
        ),
        "mm_io_worker_num": _AS_ABOVE,
        "allowed_media_domains media_url_max_file_size_mb limit_mm_data_per_request": (
            "They say what may be fetched; what was fetched is in the key by its hash."
        ),
        "enable_prefix_mm_cache mm_preprocess_cache_size_mb enable_mm_global_cache": (
            "They say which outputs of encoders are kept; what is not kept is computed again."
        ),
        "mm_global_cache_backend": _AS_ABOVE,
    },
    "model": {
        "model_path revision model_checksum": (
            "What is loaded counts by its content or its commit, and `hf_config` is in the key as it"
            " is after every override."
        ),
        "context_length": "What the user wrote; the model's `context_len` is what came of it.",
        "startup_weight_load_mode weight_loader_disable_mmap weight_loader_prefetch_checkpoints": (
            "They say how files of weights are read, whose content is in the key."
        ),
        "weight_loader_prefetch_num_threads weight_loader_drop_cache_after_load": _AS_ABOVE,
        "download_dir delete_ckpt_after_loading": _AS_ABOVE,
        "remote_instance_weight_loader_seed_instance_ip engine_info_bootstrap_port": (
            "They say from whom weights come that have no files here; these need a version."
        ),
        "remote_instance_weight_loader_seed_instance_service_port": _AS_ABOVE,
        "remote_instance_weight_loader_send_weights_group_ports": _AS_ABOVE,
        "remote_instance_weight_loader_backend modelexpress_config": _AS_ABOVE,
        "remote_instance_weight_loader_start_seed_via_transfer_engine": _AS_ABOVE,
        "weight_cache_mode weight_cache_socket weight_cache_timeout": _AS_ABOVE,
        "checkpoint_engine_wait_weights_before_ready": _AS_ABOVE,
        "modelopt_checkpoint_save_path modelopt_export_path": "They write weights elsewhere.",
    },
    "observability": {
        "log_level log_level_http log_requests log_requests_level log_requests_format": (
            "They watch, and change nothing."
        ),
        "log_requests_target uvicorn_access_log_exclude_prefixes crash_dump_folder": _AS_ABOVE,
        "show_time_cost enable_metrics smg_http_sidecar_port enable_mfu_metrics": _AS_ABOVE,
        "enable_metrics_for_all_schedulers load_snapshot_publish_interval": _AS_ABOVE,
        "tokenizer_metrics_custom_labels_header tokenizer_metrics_allowed_custom_labels": _AS_ABOVE,
        "extra_metric_labels bucket_time_to_first_token bucket_inter_token_latency": _AS_ABOVE,
        "bucket_e2e_request_latency prompt_tokens_buckets generation_tokens_buckets": _AS_ABOVE,
        "gc_warning_threshold_secs decode_log_interval enable_request_time_stats_logging": _AS_ABOVE,
        "kv_events_config load_publish_endpoint enable_forward_pass_metrics": _AS_ABOVE,
        "forward_pass_metrics_worker_id forward_pass_metrics_ipc_name enable_trace": _AS_ABOVE,
        "trace_modules otlp_traces_endpoint otlp_service_name export_metrics_to_file": _AS_ABOVE,
        "export_metrics_to_file_dir stat_loggers": _AS_ABOVE,
        "kv_canary kv_canary_real_data kv_canary_sweep_interval": (
            "They compare what is in the pool with what was written there."
        ),
        "debug_tensor_dump_output_folder debug_tensor_dump_layers": "They write what passes by.",
    },
    "parallel": {
        "tp_size": "TP size is no part of a page: ranks of any size find their heads in it.",
        "dp_size load_balance_method": (
            "How many equal engines there are, and how requests are divided among them."
        ),
        "nccl_port dist_timeout dist_init_addr gated_launch_port nnodes node_rank": (
            "They start processes, and say where they are."
        ),
        "enable_p2p_check enable_dp_attention_local_control_broadcast": (
            "They say how processes reach each other."
        ),
        "pp_max_micro_batch_size pp_async_batch_depth": (
            "They say which requests share a pass; a token attends to its own request alone."
        ),
        "enable_dp_attention": "What the user wrote; `attn_dp_size` is what came of it.",
        "enable_dp_lm_head enable_tp_lm_head_all_to_all": "They divide logits among ranks.",
    },
    "schedule": {
        "mem_fraction_static max_running_requests max_queued_requests max_total_tokens": (
            "How much room there is; one page's content does not depend on the others' number."
        ),
        "swa_full_tokens_ratio _swa_full_tokens_ratio_explicitly_set swa_prefix_tails": _AS_ABOVE,
        "max_mamba_cache_size mamba_full_memory_ratio": _AS_ABOVE,
        "chunked_prefill_size enable_dynamic_chunking max_prefill_tokens prefill_max_requests": (
            "They say which requests and tokens share a pass; a token attends to its own request"
            " alone, to all of it that went before."
        ),
        "enable_mixed_chunk disable_overlap_schedule num_continuous_decode_steps": _AS_ABOVE,
        "prefill_decode_interval prefill_decode_interval_min_bs scheduler_recv_interval": _AS_ABOVE,
        "schedule_policy schedule_conservativeness retraction_policy": (
            "They say when a request runs."
        ),
        "enable_priority_scheduling disable_priority_preemption default_priority_value": _AS_ABOVE,
        "abort_on_priority_when_disabled schedule_low_priority_values_first": _AS_ABOVE,
        "priority_scheduling_preemption_threshold min_free_slots_delay": _AS_ABOVE,
        "enable_prefill_delayer prefill_delayer_max_delay_passes": _AS_ABOVE,
        "prefill_delayer_token_usage_low_watermark prefill_delayer_forward_passes_buckets": (
            _AS_ABOVE
        ),
        "prefill_delayer_wait_seconds_buckets prefill_delayer_queue_min_ratio": _AS_ABOVE,
        "prefill_delayer_max_delay_ms": _AS_ABOVE,
    },
    "serving": {
        "tokenizer_path tokenizer_mode tokenizer_backend tokenizer_worker_num": (
            "They bring token ids about, and every page's key has these."
        ),
        "detokenizer_worker_num skip_tokenizer_init enable_dynamic_batch_tokenizer": _AS_ABOVE,
        "dynamic_batch_tokenizer_batch_size dynamic_batch_tokenizer_batch_timeout": _AS_ABOVE,
        "enable_tokenizer_batch_encode disable_tokenizer_batch_decode": _AS_ABOVE,
        "chat_template trust_request_chat_template hf_chat_template_name": _AS_ABOVE,
        "completion_template default_chat_template_kwargs allow_auto_truncate": _AS_ABOVE,
        "host port fastapi_root_path enable_http_worker_reuseport smg_grpc_mode grpc_mode": (
            "They belong to the front end, before there are token ids and after."
        ),
        "grpc_port grpc_response_timeout_secs grpc_worker_threads sidecar sidecar_args": _AS_ABOVE,
        "enable_http2 http2_max_concurrent_streams http2_initial_connection_window_size": _AS_ABOVE,
        "ssl_keyfile ssl_certfile ssl_ca_certs ssl_keyfile_password enable_ssl_refresh": _AS_ABOVE,
        "api_key admin_api_key served_model_name file_storage_path enable_cache_report": _AS_ABOVE,
        "return_input_ids return_output_ids enable_response_store tool_call_parser": _AS_ABOVE,
        "tool_server reasoning_parser asr_max_buffer_seconds asr_max_concurrent_sessions": _AS_ABOVE,
        "stream_interval batch_notify_size stream_response_default_include_usage": _AS_ABOVE,
        "incremental_streaming_output": _AS_ABOVE,
        "skip_server_warmup warmups": "What runs before the first request.",
        "weight_version": "A name that is sent back; what is loaded counts by its content.",
        "strip_thinking_cache enable_streaming_session": (
            "They say which tokens' KV is kept, not what it is."
        ),
        "enable_strict_thinking sampling_defaults preferred_sampling_params": (
            "They choose the next token, whose id is in the key."
        ),
        "constrained_json_whitespace_pattern constrained_json_disable_any_whitespace": _AS_ABOVE,
        "constrained_json_max_whitespace_cnt": _AS_ABOVE,
    },
    "spec": {
        "speculative_draft_model_path speculative_draft_model_revision": (
            "What is loaded counts by its content or its commit."
        ),
        "speculative_accept_threshold_single speculative_accept_threshold_acc": (
            "They choose the next token, whose id is in the key."
        ),
        "speculative_use_rejection_sampling speculative_use_block_verification": _AS_ABOVE,
        "speculative_boundary_reduction": "As `boundary_reduction`, for what drafts.",
        "spec_trace_dir": "It watches, and changes nothing.",
    },
}
"""The fields by SGLang's namespaces."""

CLASSES_PROVEN_OUT: Final[Mapping[str, Mapping[str, str]]] = {
    "sglang.srt.configs.model_config.ModelConfig": {
        "model_path model_weights revision": "What is loaded counts by its content or its commit.",
        "sampling_defaults hf_generation_config hf_eos_token_id": "Defaults of sampling.",
        "think_end_ids self_opened_think_start_ids request_selectable_think_end_id_sequences": (
            "They say where thinking begins and ends in an output, whose ids are in the key."
        ),
    },
    "sglang.srt.model_executor.cuda_graph_config.PhaseConfig": {
        "max_bs bs max_seq_len max_context_size full_prefill_max_req": (
            "For which batches there is a graph; they follow from the scheduler's."
        ),
        "full_prefill_prefix_chunk_tokens": _AS_ABOVE,
    },
    "transformers.configuration_utils.PreTrainedConfig": {
        "_name_or_path transformers_version": (
            "Where it was read from and who wrote it; what it says is in the key."
        ),
    },
}
"""The attributes of what the fields and the model's configuration consist of, by class."""
