"""The fields of vLLM's configuration that are known to be in the key of every page, by class.

As of vLLM 0.33. Whatever else there is counts too, and fails `test_engine_fields.py`.
"""

KEYED: dict[str, str] = {
    "vllm.config.attention.AttentionConfig": (
        "backend minimax_m3_msa_decode_backend backend_per_kind flash_attn_version "
        "flash_attn_max_num_splits_for_cuda_graph tokenspeed_mla_min_split_kv "
        "tq_max_kv_splits_for_cuda_graph use_trtllm_attention "
        "disable_flashinfer_q_quantization mla_prefill_backend use_prefill_query_quantization "
        "indexer_kv_dtype indexer_sparse_logits hisparse_config use_non_causal "
        "sparse_mla_force_mqa sparse_mla_prefill_workspace_factor flex_attn_block_m "
        "flex_attn_block_n flex_attn_q_block_size flex_attn_kv_block_size "
        "indexer_tp_shard_min_rows minimax_m3_indexer_cp trtllm_ragged_backend"
    ),
    "vllm.config.attention.HiSparseConfig": "device_buffer_size eager_host_mirror",
    "vllm.config.aux_output.AuxOutputConfig": "enable_return_routed_experts max_bytes",
    "vllm.config.cache.CacheConfig": (
        "block_size user_specified_block_size prefix_match_unit cache_dtype "
        "is_attention_free sliding_window kv_cache_dtype_skip_layers mamba_page_size_padded "
        "skip_page_size_padded mamba_block_size mamba_cache_dtype mamba_ssm_cache_dtype "
        "mamba_cache_mode enable_mamba_shared_prefix_checkpoint replayssm_buffer_len "
        "use_replayssm use_kda_recoverssm effective_attention_block_size hash_block_size "
        "cache_hit_alignment_tokens kv_sharing_fast_prefill swa_bounded_replay "
        "_block_size_resolved"
    ),
    "vllm.config.compilation.CompilationConfig": (
        "mode backend custom_ops ir_enable_torch_wrap splitting_ops compile_mm_encoder "
        "cudagraph_mm_encoder encoder_cudagraph_token_budgets "
        "encoder_cudagraph_max_vision_items_per_batch encoder_cudagraph_max_frames_per_batch "
        "cudagraph_decoder_replay decoder_replay_cudagraph_capture_sizes "
        "decoder_replay_trim_threshold compile_sizes inductor_compile_config inductor_passes "
        "cudagraph_mode cudagraph_copy_inputs cudagraph_specialize_lora "
        "use_inductor_graph_partition pass_config dynamic_shapes_config fast_moe_cold_start"
    ),
    "vllm.config.compilation.DynamicShapesConfig": "type evaluate_guards assume_32_bit_indexing",
    "vllm.config.compilation.PassConfig": (
        "fuse_norm_quant fuse_act_quant fuse_attn_quant eliminate_noops "
        "enable_qk_norm_rope_fusion fuse_rope_kvcache_cat_mla fuse_act_padding "
        "fuse_mla_dual_rms_norm fuse_rope_kvcache fuse_qk_norm_rope_kvcache "
        "rope_kvcache_fusion_max_token_num"
    ),
    "vllm.config.device.DeviceConfig": "device_type",
    "vllm.config.diffusion.DiffusionConfig": "canvas_length max_denoising_steps",
    "vllm.config.ec_manager_config.EncoderCacheManagerConfig": (
        "encoder_cache_manager_cls manager_config"
    ),
    "vllm.config.engram.EngramConfig": "cpu_offload embedding_across_dp dp_shared_memory use_thp",
    "vllm.config.kernel.IrOpPriorityConfig": "rms_norm fused_add_rms_norm gelu_and_mul_sparse",
    "vllm.config.kernel.KernelConfig": (
        "ir_op_priority enable_flashinfer_autotune enable_rocm_segmented_attn_autotune "
        "enable_cutedsl_warmup enable_jit_warmup moe_backend sparse_indexer_topk_backend "
        "linear_backend linear_backend_per_quant monokernel"
    ),
    "vllm.config.load.LoadConfig": "load_format model_loader_extra_config ignore_patterns",
    "vllm.config.lora.LoRAConfig": (
        "max_lora_rank fully_sharded_loras lora_dtype target_modules default_mm_loras "
        "enable_tower_connector_lora specialize_active_lora enable_mixed_moe_lora_format "
        "enable_moe_shared_loras max_lora_cls_labels"
    ),
    "vllm.config.mamba.MambaConfig": (
        "backend enable_stochastic_rounding stochastic_rounding_philox_rounds ssu_algorithm"
    ),
    "vllm.config.model.ModelConfig": (
        "runner convert trust_remote_code dtype hf_config hf_text_config is_submodel_config "
        "word_embeddings_untied_by_checkpoint code_revision max_model_len "
        "spec_target_max_model_len quantization quantization_config "
        "allow_deprecated_quantization enforce_eager enable_trace_replay "
        "disable_sliding_window disable_cascade_attn enable_prompt_embeds config_format "
        "model_class_overrides model_impl pooler_config multimodal_config"
    ),
    "vllm.config.multimodal.MultiModalConfig": (
        "language_model_only limit_per_prompt enable_mm_embeds media_io_kwargs "
        "mm_processor_kwargs mm_device_do_normalize mm_processor_cache_gb "
        "mm_processor_cache_type mm_hasher_algorithm mm_shm_cache_max_object_size_mb "
        "mm_encoder_only mm_encoder_tp_mode mm_encoder_attn_backend mm_encoder_attn_dtype "
        "mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path "
        "mm_encoder_fp8_scale_save_margin interleave_mm_strings skip_mm_profiling "
        "video_pruning_rate video_pruning_method mm_tensor_ipc allow_missing_mm_embeddings "
        "mm_ipc_gpu_memory_gb"
    ),
    "vllm.config.parallel.EPLBConfig": (
        "window_size step_interval num_redundant_experts log_balancedness "
        "log_balancedness_interval use_async policy communicator enable_migration_batching"
    ),
    "vllm.config.parallel.ParallelConfig": (
        "pipeline_parallel_size prefill_context_parallel_size data_parallel_size is_moe_model "
        "enable_hc_sp enable_expert_parallel enable_batch_sharded_sampling "
        "enable_ep_weight_filter enable_eplb eplb_config expert_placement_strategy "
        "all2all_backend enable_elastic_ep elastic_ep_max_dp_size enable_dbo ubatch_size "
        "dbo_decode_token_threshold dbo_prefill_token_threshold "
        "disable_nccl_for_dp_synchronization worker_cls worker_extension_cls "
        "decode_context_parallel_size dcp_kv_cache_interleave_size dcp_comm_backend "
        "dcp_q_replicate cp_kv_cache_interleave_size _allow_auto_resolve_cp_interleave_size"
    ),
    "vllm.config.pooler.PoolerConfig": (
        "task pooling_type seq_pooling_type tok_pooling_type use_activation "
        "enable_flash_late_interaction dimensions enable_chunked_processing max_embed_len "
        "logit_mean logit_sigma step_tag_id returned_token_ids"
    ),
    "vllm.config.quantization.QuantSpec": "weight activation",
    "vllm.config.quantization.QuantizationConfigArgs": "linear moe ignore targets",
    "vllm.config.scheduler.SchedulerConfig": (
        "runner_type enable_chunked_prefill is_multimodal_model disable_chunked_mm_input "
        "scheduler_cls disable_hybrid_kv_cache_manager"
    ),
    "vllm.config.speculative.SpeculativeConfig": (
        "enforce_eager num_speculative_tokens model method quantization moe_backend "
        "attention_backend kv_cache_dtype max_model_len revision code_revision "
        "index_share_for_mtp_iteration disable_padded_drafter_batch disable_eagle_block_drop "
        "use_local_argmax_reduction use_heterogeneous_vocab prompt_lookup_max "
        "prompt_lookup_min parallel_drafting target_model_config target_parallel_config "
        "num_speculative_tokens_per_batch_size draft_model_config draft_parallel_config "
        "suffix_decoding_max_tree_depth suffix_decoding_max_cached_requests "
        "suffix_decoding_max_spec_factor suffix_decoding_min_token_prob draft_load_config "
        "rejection_sample_method synthetic_acceptance_rates synthetic_acceptance_length "
        "enable_adaptive_verification draft_sample_method dspark_draft_topk "
        "disable_lookahead_block_hashes draft_lm_head_quantization fly_entropy_threshold "
        "fly_entropy_top_k fly_window_size xpress_topc"
    ),
    "vllm.config.vllm.VllmConfig": (
        "model_config cache_config parallel_config scheduler_config device_config load_config "
        "attention_config aux_output_config engram_config mamba_config kernel_config "
        "lora_config speculative_config diffusion_config quant_config compilation_config "
        "ec_manager_config additional_config optimization_level performance_mode "
        "weight_transfer_config"
    ),
    "vllm.config.weight_transfer.WeightTransferConfig": "backend",
    "vllm.model_executor.layers.quantization.utils.quant_utils.QuantKey": (
        "dtype scale scale2 symmetric"
    ),
    "vllm.model_executor.layers.quantization.utils.quant_utils.ScaleDesc": (
        "dtype static group_shape"
    ),
    "vllm.scalar_type.ScalarType": "exponent mantissa signed bias _finite_values_only nan_repr",
}

SINCE_0_33: dict[str, str] = {
    "vllm.config.attention.AttentionConfig": (
        "indexer_tp_shard_min_rows minimax_m3_indexer_cp trtllm_ragged_backend"
    ),
    "vllm.config.cache.CacheConfig": "simple_cpu_offload_num_blocks",
    "vllm.config.kernel.KernelConfig": "monokernel",
    "vllm.config.speculative.SpeculativeConfig": (
        "disable_lookahead_block_hashes draft_lm_head_quantization fly_entropy_threshold "
        "fly_entropy_top_k fly_window_size xpress_topc"
    ),
    "vllm.config.vllm.VllmConfig": "watchdog_config",
}
"""Fields on any list that vLLM 0.32 does not have."""
