//! Tests of `config.json`: what is read, and what is refused by name.

use ops::{RotaryLayout, RotaryScaling};
use serde_json::{Value, json};

use super::*;

fn llama() -> Value {
    json!({
        "model_type": "llama", "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5
    })
}

fn with(mut base: Value, changes: &[(&str, Value)]) -> Result<ModelConfig> {
    for (name, value) in changes {
        base[*name] = value.clone();
    }
    ModelConfig::from_json(&base.to_string())
}

#[test]
fn both_spellings_of_rotary_embedding_are_read() {
    let scaling = json!({
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16
    });
    let mut parameters = scaling.clone();
    parameters["rope_theta"] = json!(500.0);
    let new = with(llama(), &[("rope_parameters", parameters), ("dtype", json!("bfloat16"))]).unwrap();
    let old = [("rope_theta", json!(500.0)), ("rope_scaling", scaling), ("torch_dtype", json!("bfloat16"))];
    let old = with(llama(), &old).unwrap();
    assert_eq!(new.rotary, old.rotary);
    let rotary = new.rotary.unwrap();
    assert_eq!((rotary.theta, rotary.max_len), (500.0, 64));
    assert!(matches!(rotary.scaling, RotaryScaling::Llama3 { original_max_len: 16, .. }));
    let linear = with(llama(), &[("rope_scaling", json!({"type": "linear", "factor": 2.0}))]).unwrap();
    assert_eq!(linear.rotary.unwrap().scaling, RotaryScaling::Linear { factor: 2.0 });
    let none = with(llama(), &[("rope_scaling", Value::Null)]).unwrap();
    assert_eq!(none.rotary.unwrap().theta, 10_000.0);
}

type Case = (Vec<(&'static str, Value)>, [&'static str; 2]);

/// Returns the field of a model in 4 bits, with these fields of its own.
fn bits(more: Value) -> Value {
    let mut json = json!({"quant_method": "bitsandbytes", "load_in_4bit": true});
    json.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    json
}

/// Checks that the error of each change of a configuration has both parts, in one line.
fn assert_named(cases: Vec<Case>) {
    for (changes, parts) in cases {
        let line = with(llama(), &changes).unwrap_err().to_string();
        assert!(parts.iter().all(|part| line.contains(part)) && !line.contains('\n'), "{line}");
    }
}

#[test]
fn what_is_not_supported_is_named() {
    assert_named(vec![
        (vec![("hidden_act", json!("relu"))], ["hidden_act is \"relu\"", "silu"]),
        (vec![("quantization_config", json!({"bits": 4}))], ["quant_method is missing", "bitsandbytes"]),
        (vec![("quantization_config", json!({"quant_method": "gptq"}))], ["quant_method is \"gptq\"", "f16"]),
        (vec![("quantization_config", bits(json!({"bnb_4bit_quant_type": "int4"})))], ["\"int4\"", "nf4"]),
        (
            vec![("quantization_config", bits(json!({"load_in_8bit": true})))],
            ["load_in_4bit is true", "one of"],
        ),
        (
            vec![("quantization_config", bits(json!({"llm_int8_has_fp16_weight": true})))],
            ["fp16_weight", "false"],
        ),
        (
            vec![("quantization_config", bits(json!({"bits_of_scales": 3})))],
            ["quantization_config.bits_of_scales", "(3)"],
        ),
        (vec![("rope_interleaved", json!(true))], ["rope_interleaved is true", "false"]),
        (vec![("a", json!(1)), ("b", json!("x"))], ["a (1), b (\"x\")", "remove"]),
        (vec![("num_key_value_heads", json!(3))], ["num_key_value_heads is 3", "divide"]),
        (vec![("hidden_size", json!(0))], ["hidden size is 0", "above 0"]),
        (vec![("vocab_size", json!("many"))], ["vocab_size is \"many\"", "whole number"]),
        (vec![("vocab_size", Value::Null)], ["vocab_size is missing", "give"]),
        (
            vec![("model_type", json!("bert"))],
            ["\"bert\"", "llama, mistral, mixtral, qwen2, qwen2_moe, qwen3, qwen3_moe, deepseek_v3, gpt2"],
        ),
        (
            vec![("model_type", Value::Null)],
            [
                "model_type is missing",
                "llama, mistral, mixtral, qwen2, qwen2_moe, qwen3, qwen3_moe, deepseek_v3, gpt2",
            ],
        ),
        (vec![("initializer_range", json!(-1))], ["initializer_range is -1", "0 or more"]),
        (vec![("initializer_range", json!(1e39))], ["initializer_range is 1000", "finite"]),
        (vec![("rms_norm_eps", json!(-1e-6))], ["rms_norm_eps is -0.000001", "0 or more"]),
        (vec![("head_dim", json!(7))], ["head_dim is 7", "even"]),
        (vec![("tie_word_embeddings", json!(1))], ["tie_word_embeddings is 1", "true or false"]),
        (vec![("is_causal", json!(false))], ["is_causal is false", "true"]),
        (vec![("num_hidden_layers", json!(2_000_000_000))], ["num_hidden_layers is 2000000000", "65536"]),
        (
            vec![("model_type", json!("mistral")), ("sliding_window", json!(0))],
            ["sliding_window is 0", "above 0"],
        ),
    ]);
    assert!(ModelConfig::from_json("[]").unwrap_err().to_string().contains("config.json"));
}

#[test]
fn rotary_scaling_that_is_not_supported_is_named() {
    assert_named(vec![
        (
            vec![("rope_scaling", json!({"type": "dynamic", "factor": 2.0}))],
            ["rope_scaling.rope_type", "yarn"],
        ),
        (
            vec![("rope_scaling", json!({"type": "yarn", "factor": 2.0, "mscale": 1.0}))],
            ["rope_scaling.mscale", "known"],
        ),
        (vec![("rope_scaling", Value::Null), ("rope_theta", json!(0))], ["rope_theta is 0", "above 0"]),
        (
            vec![("rope_scaling", json!({"type": "linear", "factor": -2}))],
            ["rope_scaling.factor is -2", "above 0"],
        ),
        (
            vec![("rope_scaling", json!({"type": "yarn", "factor": 2.0, "beta_fast": 0}))],
            ["rope_scaling.beta_fast is 0", "above 0"],
        ),
        (
            vec![(
                "rope_scaling",
                json!({"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 0}),
            )],
            ["rope_scaling.original_max_position_embeddings is 0", "above 0"],
        ),
        (
            vec![(
                "rope_scaling",
                json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16}),
            )],
            ["rope_scaling.high_freq_factor is 4", "low_freq_factor"],
        ),
    ]);
}

#[test]
fn what_is_null_or_whole_is_read_as_transformers_reads_it() {
    let mistral =
        |name: &str, value: Value| with(llama(), &[("model_type", json!("mistral")), (name, value)]);
    assert_eq!(mistral("num_key_value_heads", Value::Null).unwrap().num_kv_heads, 4);
    assert!(with(llama(), &[("partial_rotary_factor", json!(1))]).is_ok());
    assert!(with(llama(), &[("layer_types", json!(["full_attention", "full_attention"]))]).is_ok());
    assert!(with(llama(), &[("layer_types", json!(["full_attention", "sliding_attention"]))]).is_err());
    let yarn = |original: Value| {
        let rope = json!({"type": "yarn", "factor": null, "original_max_position_embeddings": original});
        with(llama(), &[("rope_scaling", rope)])
    };
    let config = yarn(json!(16)).unwrap();
    let Some(RotaryScaling::Yarn { factor, .. }) = config.rotary.map(|rotary| rotary.scaling) else {
        panic!()
    };
    assert_eq!(factor, config.max_len as f64 / 16.0);
    assert!(yarn(Value::Null).unwrap_err().to_string().contains("rope_scaling.factor is missing"));
    for (given, read) in [(Some(Value::Null), false), (Some(json!(false)), false), (None, true)] {
        let mut rope = json!({"type": "yarn", "factor": 2.0});
        rope.as_object_mut().unwrap().extend(given.map(|given| ("truncate".to_string(), given)));
        let rotary = with(llama(), &[("rope_scaling", rope)]).unwrap().rotary.unwrap();
        assert!(matches!(rotary.scaling, RotaryScaling::Yarn { truncate, .. } if truncate == read));
    }
    assert!(with(llama(), &[("partial_rotary_factor", json!(0.5))]).is_err());
    let padded = with(llama(), &[("pad_token_id", json!(3))]).unwrap();
    assert!(padded.notes()[0].starts_with("pad_token_id of 3: "), "{:?}", padded.notes());
}

#[test]
fn fingerprints_are_of_what_is_computed() {
    let of = |changes: &[(&str, Value)]| with(llama(), changes).unwrap().fingerprint();
    let same =
        [("eos_token_id", json!(3)), ("initializer_range", json!(0.1)), ("rope_theta", json!(10000.0))];
    assert_eq!(of(&[]), of(&same));
    assert_ne!(of(&[]), of(&[("rope_theta", json!(500.0))]));
}

#[test]
fn fields_that_change_nothing_are_accepted_and_kept() {
    let config = with(
        llama(),
        &[
            ("bos_token_id", json!(1)),
            ("eos_token_id", json!([2, 3])),
            ("use_cache", json!(true)),
            ("transformers_version", json!("4.40.0")),
            ("pretraining_tp", json!(1)),
            ("something_else", json!(false)),
            ("attn_pdrop", json!(0.1)),
        ],
    )
    .unwrap();
    let known = json!({
        "n_special": 0, "predict_special_tokens": true, "_num_labels": 2, "num_labels": 2, "keys_to_ignore_at_inference": ["past_key_values"],
        "max_sequence_length": 2048, "do_sample": true, "temperature": 0.7, "sep_token_id": 4, "use_bfloat16": true,
        "rope_scaling": {"type": "yarn", "factor": 2.0, "attn_factor": 1, "extrapolation_factor": 1.0, "finetuned": true}
    });
    let known: Vec<(&str, Value)> =
        known.as_object().unwrap().iter().map(|(name, value)| (&**name, value.clone())).collect();
    assert_eq!(with(llama(), &known).unwrap().notes(), [""; 0]);
    let attention = [("rope_scaling", json!({"type": "yarn", "factor": 2.0, "attn_factor": 0.5}))];
    let line = with(llama(), &attention).unwrap_err().to_string();
    assert!(line.contains("rope_scaling.attn_factor is 0.5; supported is 1.0"), "{line}");
    let remote = with(llama(), &[("auto_map", json!({"AutoModelForCausalLM": "modeling.Model"}))]).unwrap();
    assert!(
        remote.notes()[0].starts_with("auto_map names code of the folder, which is not run"),
        "{:?}",
        remote.notes()
    );
    assert_eq!(config.json()["eos_token_id"], json!([2, 3]));
    assert_eq!(config.notes().len(), 1);
    assert!(config.notes()[0].contains("attn_pdrop"));
}

#[test]
fn windows_are_each_familys_own() {
    let of = |family: &str, changes: &[(&str, Value)]| {
        let changes = [&[("model_type", json!(family))], changes].concat();
        with(llama(), &changes).map(|config| config.windows)
    };
    let window = ("sliding_window", json!(5));
    assert_eq!(of("mistral", std::slice::from_ref(&window)).unwrap(), [Some(5); 2]);
    assert_eq!(of("mistral", &[("sliding_window", Value::Null)]).unwrap(), [None; 2]);
    assert_eq!(of("mistral", &[]).unwrap(), [Some(4096); 2]);
    assert_eq!(of("qwen2", std::slice::from_ref(&window)).unwrap(), [None; 2]);
    let on = ("use_sliding_window", json!(true));
    let by_count = [window.clone(), on.clone(), ("max_window_layers", json!(1))];
    assert_eq!(of("qwen2", &by_count).unwrap(), [None, Some(5)]);
    let types = |first: &str, second: &str| ("layer_types", json!([first, second]));
    let (full, sliding) = ("full_attention", "sliding_attention");
    assert_eq!(of("qwen3", &[window.clone(), on.clone(), types(sliding, full)]).unwrap(), [Some(5), None]);
    assert!(
        of("qwen3", &[window.clone(), types(sliding, full)])
            .unwrap_err()
            .to_string()
            .contains("sliding_window")
    );
    assert!(
        of("qwen3", &[window, on, types("linear_attention", full)])
            .unwrap_err()
            .to_string()
            .contains("layer_types")
    );
}

fn experts() -> Value {
    let mut base = llama();
    base["model_type"] = json!("qwen3_moe");
    base["num_experts"] = json!(5);
    base["num_experts_per_tok"] = json!(2);
    base["moe_intermediate_size"] = json!(20);
    base
}

#[test]
fn experts_are_read() {
    let of = |changes: &[(&str, Value)]| with(experts(), changes).unwrap().experts;
    let all = of(&[]).unwrap();
    assert_eq!((all.count, all.per_token, all.width, all.shared_width), (5, 2, 20, None));
    assert_eq!((all.normalized, &all.layers[..]), (false, &[true, true][..]));
    assert_eq!(of(&[("decoder_sparse_step", json!(2))]).unwrap().layers, [false, true]);
    assert_eq!(of(&[("mlp_only_layers", json!([1]))]).unwrap().layers, [true, false]);
    assert_eq!(of(&[("mlp_only_layers", json!([0, 1]))]), None);
    assert_eq!(of(&[("num_experts", json!(0))]), None);
    let mixtral = [
        ("model_type", json!("mixtral")),
        ("num_experts", Value::Null),
        ("moe_intermediate_size", Value::Null),
    ];
    let mixtral = with(experts(), &[&mixtral[..], &[("num_local_experts", json!(3))]].concat()).unwrap();
    assert_eq!(mixtral.rotary.unwrap().theta, 1e6);
    let mixtral = mixtral.experts.unwrap();
    assert_eq!((mixtral.count, mixtral.width, mixtral.normalized), (3, 48, true));
    let balanced = with(experts(), &[("output_router_logits", json!(true))]).unwrap();
    let balanced = balanced.experts.unwrap();
    assert_eq!((balanced.is_balanced, balanced.balance_coefficient), (true, 0.001));
}

#[test]
fn experts_that_cannot_be_are_named() {
    let line = |name: &str, value: Value| with(experts(), &[(name, value)]).unwrap_err().to_string();
    for (name, value, said) in [
        (
            "num_experts_per_tok",
            json!(6),
            "num_experts_per_tok is 6; it must be from 1 to the number of experts, 5",
        ),
        ("num_experts_per_tok", json!(0), "num_experts_per_tok is 0"),
        ("decoder_sparse_step", json!(0), "decoder_sparse_step is 0; it must be above 0"),
        ("mlp_only_layers", json!([-1]), "mlp_only_layers is [-1]; it must be a list of indices"),
        ("moe_intermediate_size", json!(0), "the width of experts is 0"),
        ("shared_expert_intermediate_size", json!(4), "shared_expert_intermediate_size (4)"),
        ("router_jitter_noise", json!(0.1), "router_jitter_noise (0.1)"),
        ("n_group", json!(2), "n_group (2)"),
    ] {
        let got = line(name, value);
        assert!(got.contains(said), "{got}");
    }
    let jitter = [("model_type", json!("mixtral")), ("router_jitter_noise", json!(0.1))];
    let got = with(experts(), &jitter).unwrap_err().to_string();
    assert!(got.contains("router_jitter_noise is 0.1; supported is 0"), "{got}");
}

fn deepseek(changes: &[(&str, Value)]) -> Result<ModelConfig> {
    let base = json!({
        "model_type": "deepseek_v3", "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64, "q_lora_rank": null,
        "kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5, "n_routed_experts": 8,
        "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3, "moe_intermediate_size": 10, "n_shared_experts": 2,
        "first_k_dense_replace": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1,
        "ep_size": 1, "seq_aux": true, "aux_loss_alpha": 0.001, "num_nextn_predict_layers": 1
    });
    with(base, changes)
}

#[test]
fn latent_attention_and_sigmoids_are_read() {
    let config = deepseek(&[]).unwrap();
    let latent = config.latent.clone().unwrap();
    assert_eq!((config.head_dim, config.value_dim(), latent.query_rank, latent.key_rank), (10, 5, None, 8));
    assert_eq!(latent.scale, 1.0 / 10f64.sqrt());
    assert_eq!(config.rotary.clone().unwrap().layout, RotaryLayout::Interleaved);
    assert!(config.notes()[0].starts_with("num_nextn_predict_layers of 1: "), "{:?}", config.notes());
    let experts = config.experts.unwrap();
    assert_eq!((experts.shared_width, experts.normalized), (Some(20), true));
    assert_eq!(experts.layers, [false, true, true]);
    assert_eq!(experts.sigmoid, Some(SigmoidConfig { groups: 4, groups_per_token: 2, factor: 2.5 }));
    let yarn = json!({"type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.5});
    let config = deepseek(&[("rope_scaling", yarn), ("rope_interleave", json!(false))]).unwrap();
    let sharper = |by: f64| 0.1 * by * 4f64.ln() + 1.0;
    let Some(RotaryScaling::Yarn { attention_factor, .. }) = config.rotary.map(|rotary| rotary.scaling)
    else {
        panic!()
    };
    assert_eq!(attention_factor, Some(sharper(1.0) / sharper(0.5)));
    assert!((config.latent.unwrap().scale - sharper(0.5).powi(2) / 10f64.sqrt()).abs() < 1e-15);
}

#[test]
fn latent_attention_and_sigmoids_that_cannot_be_are_named() {
    for (name, value, said) in [
        ("n_group", json!(3), "n_group is 3; it must divide n_routed_experts, 8"),
        ("n_group", json!(8), "each group must have two experts"),
        ("topk_group", json!(1), "topk_group is 1"),
        ("scoring_func", json!("softmax"), "scoring_func is \"softmax\"; supported is \"sigmoid\""),
        ("topk_method", json!("greedy"), "topk_method is \"greedy\""),
        ("num_key_value_heads", json!(2), "num_key_value_heads is 2; supported is 4"),
        ("qk_rope_head_dim", json!(3), "qk_rope_head_dim is 3; it must be even"),
        ("kv_lora_rank", json!(0), "kv_lora_rank is 0; it must be above 0"),
        ("v_head_dim", json!(0), "v_head_dim is 0; it must be above 0"),
        ("routed_scaling_factor", json!(0), "routed_scaling_factor is 0"),
        ("index_topk", json!(2), "index_topk (2)"),
        ("head_dim", json!(8), "head_dim is 8; supported is 4"),
        ("n_shared_experts", json!(0), "the width of the shared expert is 0"),
    ] {
        let line = deepseek(&[(name, value)]).unwrap_err().to_string();
        assert!(line.contains(said) && !line.contains('\n'), "{line}");
    }
}

#[test]
fn sizes_whose_weights_cannot_be_counted_are_refused() {
    let experts = [
        ("model_type", json!("mixtral")),
        ("num_local_experts", json!(1 << 16)),
        ("intermediate_size", json!(1u64 << 31)),
    ];
    for changes in [
        &[("hidden_size", json!(800_000_000u64)), ("intermediate_size", json!(2_133_333_344u64))][..],
        &experts,
    ] {
        let line = with(llama(), changes).unwrap_err().to_string();
        assert!(line.contains("the number of weights that its sizes make is"), "{line}");
        assert!(line.contains("it must be at most 2^50") && !line.contains('\n'), "{line}");
    }
    for name in ["vocab_size", "intermediate_size"] {
        let line = with(llama(), &[(name, json!(u64::MAX))]).unwrap_err().to_string();
        assert_eq!(
            line,
            format!("config.json: {name} is {}; it must be a whole number up to 2^31", u64::MAX)
        );
    }
}
