"""What SGLang can be configured with that leaves KV the function that its description names (rule R16).

Beside `proven_out.py`, whose fields change no byte. These may change where numbers are rounded, as
another TP size does, and not what is computed: an engine of which nothing else is set shares pages with
every engine of the same model. A field that is on neither list counts, whatever its value. A test
(`test_engine_fields.py`) fails for a field of the installed SGLang that is on no list at all.
"""

from typing import Final

from ...sharing import Reasons

_DESCRIBED: Final = "It follows from the model's own configuration, which the description has."
_OFF: Final = (
    "By default it is off or the model's own; what else it may say is another computation."
)
_ROUNDING: Final = "It chooses kernels or how they are compiled: the same sums in another order."
_STATES: Final = "Of recurrent states; pages that have some are not shared with other engines."
_MODEL: Final = "sglang.srt.configs.model_config.ModelConfig"

AT_ANY_VALUE: Final[Reasons] = {
    "device": {"device": _ROUNDING},
    "exec.features": {
        "aux_hidden_state_capture enable_return_aux_hidden_states": "What is sent back beside tokens.",
        "return_aux_hidden_state_layer_ids": "As above.",
    },
    "exec.graph": {
        "cuda_graph_config debug_cuda_graph disable_cuda_graph_padding": _ROUNDING,
        "enable_torch_compile enable_torch_compile_debug_mode torch_compile_max_bs": _ROUNDING,
    },
    "exec.kernel": {
        "attention_backend bf16_gemm_backend decode_attention_backend": _ROUNDING,
        "disable_flashinfer_autotune dsa_decode_backend dsa_paged_mqa_logits_backend": _ROUNDING,
        "dsa_prefill_backend dsa_topk_backend dsa_triton_union dsv4_attn_backend": _ROUNDING,
        "dsv4_prefill_backend enable_amd_monokernel enable_dsa_fused_indexer": _ROUNDING,
        "enable_fused_qk_norm_rope enable_lean_attention enable_nvidia_megakernel": _ROUNDING,
        "flashinfer_autotune_skip_ops flashinfer_mla_disable_ragged": _ROUNDING,
        "fp4_gemm_runner_backend fp8_gemm_runner_backend prefill_attention_backend": _ROUNDING,
        "triton_attention_num_kv_splits triton_attention_reduce_in_fp32": _ROUNDING,
        "triton_attention_split_tile_size": _ROUNDING,
    },
    "exec.mamba": {
        "enable_int8_mamba_checkpoint enable_linear_replayssm enable_linear_replayssm_spec": _STATES,
        "enable_mamba_cache_stochastic_rounding linear_attn_backend mamba_backend": _STATES,
        "linear_attn_decode_backend linear_attn_prefill_backend mamba_ssm_dtype": _STATES,
        "linear_attn_verify_backend linear_replayssm_cache_len mamba_track_interval": _STATES,
        "mamba_cache_philox_rounds mamba_radix_cache_strategy uses_mamba_radix_cache": _STATES,
    },
    "exec.moe": {
        "moe_a2a_backend moe_runner_backend disable_shared_experts_fusion": _ROUNDING,
        "enforce_shared_experts_fusion enable_fused_moe_sum_all_reduce": _ROUNDING,
    },
    "exec.overlap": {
        "enable_single_batch_overlap enable_two_batch_overlap tbo_token_distribution_threshold": (
            "They say what is computed at the same time."
        ),
    },
    "lora": {
        "enable_lora lora_backend lora_target_modules max_lora_chunk_size max_lora_rank": (
            "Nothing, without an adapter. An adapter that they may change counts with them."
        ),
        "lora_use_virtual_experts": "As above.",
    },
    "memory": {
        "enable_page_major_kv_layout enable_unified_memory": "Where pages lie on the device.",
    },
    "mm": {
        "disable_fast_image_processor enable_multimodal image_processor_backend": (
            "Requests with items of other modalities are not cached."
        ),
        "mm_attention_backend mm_enable_dp_encoder mm_process_config trust_mm_content_hashes": (
            "As above."
        ),
    },
    "model": {
        "dtype": "The description has it, as it came out.",
        "json_model_override_args": "The model's own configuration is described after every override.",
    },
    "parallel": {"dcp_comm_backend ep_size": "How ranks divide and exchange what each has."},
    "schedule": {
        "page_size c128_page_size": "The page has it, and the description the page.",
        "disable_chunked_prefix_cache disable_hybrid_swa_memory": (
            "How much of what was computed is looked at in one pass, and how memory is divided."
        ),
    },
    "spec": {
        "_speculative_draft_quantization_explicitly_set enable_multi_layer_eagle": (
            "They say how tokens are drafted, where `speculative_algorithm` says that any are."
        ),
        "speculative_adaptive speculative_adaptive_config speculative_attention_mode": "As above.",
        "speculative_dflash_block_size speculative_domino_candidate_pool_size": "As above.",
        "speculative_draft_attention_backend speculative_draft_kv_cache_dtype": "As above.",
        "speculative_draft_load_format speculative_draft_model_quantization": "As above.",
        "speculative_draft_sink_size speculative_draft_window_size": "As above.",
        "speculative_dsa_topk_backend speculative_dspark_block_size": "As above.",
        "speculative_dspark_align_verify_tokens_to_graph_tier": "As above.",
        "speculative_dspark_confidence_sts_path speculative_dspark_sps_table_path": "As above.",
        "speculative_eagle_topk speculative_enable_w4a4_mxfp4_megamoe": "As above.",
        "speculative_moe_a2a_backend speculative_moe_runner_backend": "As above.",
        "speculative_ngram_capacity speculative_ngram_external_corpus_max_tokens": "As above.",
        "speculative_ngram_external_corpus_path speculative_ngram_external_sam_budget": "As above.",
        "speculative_ngram_match_type speculative_ngram_max_bfs_breadth": "As above.",
        "speculative_ngram_max_trie_depth speculative_ngram_min_bfs_breadth": "As above.",
        "speculative_num_draft_tokens speculative_num_steps": "As above.",
    },
    _MODEL: {
        "attention_arch attention_chunk_size compress_ratios context_len decision_config": _DESCRIBED,
        "disable_hybrid_swa_memory dtype embedding_model_spec first_k_dense_replace": _DESCRIBED,
        "full_attention_interval full_attention_layer_ids has_attention_sinks": _DESCRIBED,
        "hc_hidden_size head_dim hf_config hf_quant_config hf_text_config hidden_size": _DESCRIBED,
        "image_token_id index_head_dim is_audio_model is_audio_understandable_model": _DESCRIBED,
        "is_deepseek_v4_arch is_draft_model is_draft_quantization_explicit": _DESCRIBED,
        "is_embedding_gemma is_encoder_decoder is_fp4_experts is_generation": _DESCRIBED,
        "is_hybrid_swa is_hybrid_swa_compress is_image_understandable_model is_lm_only": _DESCRIBED,
        "is_local_attention_model is_matryoshka is_multi_layer_eagle is_multimodal": _DESCRIBED,
        "is_multimodal_breakable_cuda_graph_supported": _DESCRIBED,
        "is_multimodal_chunked_prefill_supported is_piecewise_cuda_graph_disabled_model": _DESCRIBED,
        "is_multimodal_piecewise_cuda_graph_supported joint_head_config": _DESCRIBED,
        "kv_lora_rank matryoshka_dimensions model_config_parser model_impl": _DESCRIBED,
        "model_is_mrope model_override_args ngram_embedding_n num_attention_heads": _DESCRIBED,
        "num_attention_layers num_hidden_layers num_key_value_heads nvfp4_moe_meta": _DESCRIBED,
        "num_nextn_predict_layers pointer_head qk_nope_head_dim qk_rope_head_dim": _DESCRIBED,
        "quantization quantize_and_serve requires_mm_token_modalities scaling": _DESCRIBED,
        "sliding_window_size spec_hidden_size speculative_algorithm": _DESCRIBED,
        "swa_attention_layer_ids swa_head_dim swa_kv_lora_rank swa_qk_rope_head_dim": _DESCRIBED,
        "swa_v_head_dim use_alibi use_engram use_ngram_embedding v_head_dim": _DESCRIBED,
        "vocab_size window_size": _DESCRIBED,
    },
}
"""Fields by SGLang's namespaces, and attributes by class."""

BY_DEFAULT: Final[Reasons] = {
    "disagg": {
        "decoupled_spec_role enable_pdmux encoder_only language_model_only language_only": _OFF,
        "pdmux_config_path sm_group_num": _OFF,
    },
    "exec.comm": {"enable_quant_communications enable_scattered_sconv": _OFF},
    "exec.deterministic": {"enable_deterministic_inference rl_on_policy_target": _OFF},
    "exec.dllm": {"dllm_algorithm dllm_fdfo": _OFF},
    "exec.features": {
        "enable_decoder_swa_bounded_replay enable_encoder_swa_bounded_replay enable_mis": _OFF,
        "enable_tf32_matmul": _OFF,
    },
    "exec.kernel": {
        "enable_deepseek_v4_fp4_indexer enable_precise_embedding_interpolation": _OFF,
        "prefill_kv_cache_dequant_dtype": _OFF,
    },
    "exec.moe": {
        "deepep_config deepep_dispatcher_output_dtype deepep_mode deepep_v2_mode": _OFF,
        "disable_flashinfer_cutlass_moe_fp4_allgather elastic_ep_backend enable_eplb": _OFF,
        "enable_elastic_expert_backup enable_paged_experts enable_w4a4_mxfp4_megamoe": _OFF,
        "enable_waterfill ep_dispatch_algorithm ep_join_mode ep_num_redundant_experts": _OFF,
        "eplb_algorithm eplb_min_rebalancing_utilization_threshold init_expert_location": _OFF,
        "eplb_rebalance_layers_per_chunk eplb_rebalance_num_iterations fuseep_mode": _OFF,
        "flashinfer_a2a_dispatch_type flashinfer_mxfp4_moe_precision kt_method": _OFF,
        "kt_max_deferred_experts_per_token kt_num_gpu_experts paged_experts_num_resident": _OFF,
    },
    "lora": {"experts_shared_outer_loras lora_strict_loading": _OFF},
    "memory": {"enable_hisparse hisparse_config": _OFF},
    "model": {
        "custom_weight_loader is_embedding kv_cache_dtype load_format model_config_parser": _OFF,
        "model_impl model_loader_extra_config modelopt_quant qsa_indexer_dtype": _OFF,
        "quantization quantize_and_serve trust_remote_code": _OFF,
    },
    "observability": {
        "debug_tensor_dump_input_file forward_hooks msprobe_dump_config": _OFF,
    },
    "parallel": {
        "attn_cp_size attn_dp_size cp_strategy dcp_replicate_q_proj dcp_size dwdp_size": _OFF,
        "disable_attn_tp_gather elastic_ep_initial_size enable_attn_tp_input_scattered": _OFF,
        "enable_cp_decode_attn_tp enable_cp_tp_group_sharing enable_dense_mlp_attn_tp": _OFF,
        "enable_dsa_cache_layer_split enable_kv_cache_sharding enable_layernorm_sp": _OFF,
        "enable_megamoe_for_layernorm_sp enable_prefill_cp enable_shared_experts_attn_tp": _OFF,
        "ep_join_rank_offset max_ep_size moe_dense_tp_size moe_dp_size pp_size": _OFF,
        "shared_experts_tp_size": _OFF,
    },
    "schedule": {"prefill_only_disable_kv_cache": _OFF},
    "spec": {"speculative_algorithm": _OFF},
    _MODEL: {},
}

SET_BY_LOADING: Final[Reasons] = {
    _MODEL: {"_resolved_model_arch _resolved_model_impl": _DESCRIBED},
}
"""Attributes that SGLang sets from outside of a class as it loads the model; neutral at any value."""

VARIABLES: Final = {
    "SGLANG_USE_CPU_ENGINE": _ROUNDING,
    "SGLANG_PLUGINS": "It leaves out plug-ins that would be loaded otherwise; none is looked at.",
}
"""Variables that are neutral where they are set; any other one that is set counts."""
