"""What of SGLang's configuration is known to be in the key of every page, by namespace or class.

As of SGLang 0.5.23. Whatever else there is counts too, and fails `test_engine_fields.py`.
"""

KEYED: dict[str, str] = {
    "device": ("device"),
    "disagg": (
        "decoupled_spec_role enable_pdmux encoder_only language_model_only language_only "
        "pdmux_config_path sm_group_num"
    ),
    "exec.comm": ("enable_quant_communications enable_scattered_sconv"),
    "exec.deterministic": ("enable_deterministic_inference rl_on_policy_target"),
    "exec.dllm": ("dllm_algorithm dllm_fdfo"),
    "exec.features": (
        "aux_hidden_state_capture enable_decoder_swa_bounded_replay "
        "enable_encoder_swa_bounded_replay enable_mis enable_return_aux_hidden_states "
        "enable_tf32_matmul return_aux_hidden_state_layer_ids"
    ),
    "exec.graph": (
        "cuda_graph_config debug_cuda_graph disable_cuda_graph_padding enable_torch_compile "
        "enable_torch_compile_debug_mode torch_compile_max_bs"
    ),
    "exec.kernel": (
        "attention_backend bf16_gemm_backend decode_attention_backend "
        "disable_flashinfer_autotune dsa_decode_backend dsa_paged_mqa_logits_backend "
        "dsa_prefill_backend dsa_topk_backend dsa_triton_union dsv4_attn_backend "
        "dsv4_prefill_backend enable_amd_monokernel enable_deepseek_v4_fp4_indexer "
        "enable_dsa_fused_indexer enable_fused_qk_norm_rope enable_lean_attention "
        "enable_nvidia_megakernel enable_precise_embedding_interpolation "
        "flashinfer_autotune_skip_ops flashinfer_mla_disable_ragged fp4_gemm_runner_backend "
        "fp8_gemm_runner_backend prefill_attention_backend prefill_kv_cache_dequant_dtype "
        "triton_attention_num_kv_splits triton_attention_reduce_in_fp32 "
        "triton_attention_split_tile_size"
    ),
    "exec.mamba": (
        "enable_int8_mamba_checkpoint enable_linear_replayssm enable_linear_replayssm_spec "
        "enable_mamba_cache_stochastic_rounding linear_attn_backend "
        "linear_attn_decode_backend linear_attn_prefill_backend linear_attn_verify_backend "
        "linear_replayssm_cache_len mamba_backend mamba_cache_philox_rounds "
        "mamba_radix_cache_strategy mamba_ssm_dtype mamba_track_interval "
        "uses_mamba_radix_cache"
    ),
    "exec.moe": (
        "deepep_config deepep_dispatcher_output_dtype deepep_mode deepep_v2_mode "
        "disable_flashinfer_cutlass_moe_fp4_allgather disable_shared_experts_fusion "
        "elastic_ep_backend enable_elastic_expert_backup enable_eplb "
        "enable_fused_moe_sum_all_reduce enable_paged_experts enable_w4a4_mxfp4_megamoe "
        "enable_waterfill enforce_shared_experts_fusion ep_dispatch_algorithm ep_join_mode "
        "ep_num_redundant_experts eplb_algorithm eplb_min_rebalancing_utilization_threshold "
        "eplb_rebalance_layers_per_chunk eplb_rebalance_num_iterations "
        "flashinfer_a2a_dispatch_type flashinfer_mxfp4_moe_precision fuseep_mode "
        "init_expert_location kt_max_deferred_experts_per_token kt_method kt_num_gpu_experts "
        "moe_a2a_backend moe_runner_backend paged_experts_num_resident"
    ),
    "exec.overlap": (
        "enable_single_batch_overlap enable_two_batch_overlap tbo_token_distribution_threshold"
    ),
    "lora": (
        "enable_lora experts_shared_outer_loras lora_backend lora_strict_loading "
        "lora_target_modules lora_use_virtual_experts max_lora_chunk_size max_lora_rank"
    ),
    "memory": ("enable_hisparse enable_page_major_kv_layout enable_unified_memory hisparse_config"),
    "mm": (
        "disable_fast_image_processor enable_multimodal image_processor_backend "
        "mm_attention_backend mm_enable_dp_encoder mm_process_config trust_mm_content_hashes"
    ),
    "model": (
        "custom_weight_loader dtype is_embedding json_model_override_args kv_cache_dtype "
        "load_format model_config_parser model_impl model_loader_extra_config modelopt_quant "
        "qsa_indexer_dtype quantization quantize_and_serve trust_remote_code"
    ),
    "observability": ("debug_tensor_dump_input_file forward_hooks msprobe_dump_config"),
    "parallel": (
        "attn_cp_size attn_dp_size cp_strategy dcp_comm_backend dcp_replicate_q_proj dcp_size "
        "disable_attn_tp_gather dwdp_size elastic_ep_initial_size "
        "enable_attn_tp_input_scattered enable_cp_decode_attn_tp enable_cp_tp_group_sharing "
        "enable_dense_mlp_attn_tp enable_dsa_cache_layer_split enable_kv_cache_sharding "
        "enable_layernorm_sp enable_megamoe_for_layernorm_sp enable_prefill_cp "
        "enable_shared_experts_attn_tp ep_join_rank_offset ep_size max_ep_size "
        "moe_dense_tp_size moe_dp_size pp_size shared_experts_tp_size"
    ),
    "schedule": (
        "c128_page_size disable_chunked_prefix_cache disable_hybrid_swa_memory page_size "
        "prefill_only_disable_kv_cache"
    ),
    "sglang.srt.configs.model_config.ModelConfig": (
        "attention_arch attention_chunk_size compress_ratios context_len decision_config "
        "disable_hybrid_swa_memory dtype embedding_model_spec first_k_dense_replace "
        "full_attention_interval full_attention_layer_ids has_attention_sinks hc_hidden_size "
        "head_dim hf_config hf_quant_config hf_text_config hidden_size image_token_id "
        "index_head_dim is_audio_model is_audio_understandable_model is_deepseek_v4_arch "
        "is_draft_model is_draft_quantization_explicit is_embedding_gemma is_encoder_decoder "
        "is_fp4_experts is_generation is_hybrid_swa is_hybrid_swa_compress "
        "is_image_understandable_model is_lm_only is_local_attention_model is_matryoshka "
        "is_multi_layer_eagle is_multimodal is_multimodal_breakable_cuda_graph_supported "
        "is_multimodal_chunked_prefill_supported is_multimodal_piecewise_cuda_graph_supported "
        "is_piecewise_cuda_graph_disabled_model joint_head_config kv_lora_rank "
        "matryoshka_dimensions model_config_parser model_impl model_is_mrope "
        "model_override_args ngram_embedding_n num_attention_heads num_attention_layers "
        "num_hidden_layers num_key_value_heads num_nextn_predict_layers nvfp4_moe_meta "
        "pointer_head qk_nope_head_dim qk_rope_head_dim quantization quantize_and_serve "
        "requires_mm_token_modalities scaling sliding_window_size spec_hidden_size "
        "speculative_algorithm swa_attention_layer_ids swa_head_dim swa_kv_lora_rank "
        "swa_qk_rope_head_dim swa_v_head_dim use_alibi use_engram use_ngram_embedding "
        "v_head_dim vocab_size window_size"
    ),
    "sglang.srt.model_executor.cuda_graph_config.CudaGraphConfig": ("decode prefill"),
    "sglang.srt.model_executor.cuda_graph_config.PhaseConfig": ("backend tc_compiler"),
    "spec": (
        "_speculative_draft_quantization_explicitly_set enable_multi_layer_eagle "
        "speculative_adaptive speculative_adaptive_config speculative_algorithm "
        "speculative_attention_mode speculative_dflash_block_size "
        "speculative_domino_candidate_pool_size speculative_draft_attention_backend "
        "speculative_draft_kv_cache_dtype speculative_draft_load_format "
        "speculative_draft_model_quantization speculative_draft_sink_size "
        "speculative_draft_window_size speculative_dsa_topk_backend "
        "speculative_dspark_align_verify_tokens_to_graph_tier speculative_dspark_block_size "
        "speculative_dspark_confidence_sts_path speculative_dspark_sps_table_path "
        "speculative_eagle_topk speculative_enable_w4a4_mxfp4_megamoe "
        "speculative_moe_a2a_backend speculative_moe_runner_backend "
        "speculative_ngram_capacity speculative_ngram_external_corpus_max_tokens "
        "speculative_ngram_external_corpus_path speculative_ngram_external_sam_budget "
        "speculative_ngram_match_type speculative_ngram_max_bfs_breadth "
        "speculative_ngram_max_trie_depth speculative_ngram_min_bfs_breadth "
        "speculative_num_draft_tokens speculative_num_steps"
    ),
}
