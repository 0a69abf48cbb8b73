//! RMSNorm, rotary embedding, gated units and the chunked loss against PyTorch and transformers, and their handling
//! of invalid input.

use candle_core::{DType, Device, Module, Result, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};
use ops::{
    Gate, LinearCrossEntropyConfig, Precision, RmsNorm, Rotary, RotaryConfig, RotaryLayout, RotaryScaling,
    autocast, cross_entropy, gated_mlp, geglu, geglu_tanh, linear_cross_entropy, linear_no_bias, rms_norm,
    swiglu,
};
use serde_json::Value;

fn floats(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect()
}

fn sizes(value: &Value) -> Vec<usize> {
    floats(value).iter().map(|&x| x as usize).collect()
}

/// The largest difference, relative to the largest expected number if that is above 1.
fn gap(got: &Tensor, expected: &Value) -> Result<f64> {
    let expected = floats(expected);
    let size = expected.iter().fold(1f64, |size, x| size.max(x.abs()));
    let expected = Tensor::from_vec(expected, got.shape(), &Device::Cpu)?;
    Ok((got.to_dtype(DType::F64)? - expected)?.abs()?.max_all()?.to_scalar::<f64>()? / size)
}

fn scaling(value: &Value) -> RotaryScaling {
    let number = |field: &str| value[field].as_f64();
    let factor = number("factor").unwrap_or_default();
    let original_max_len = number("original_max_position_embeddings").unwrap_or_default() as usize;
    match value["rope_type"].as_str().unwrap() {
        "default" => RotaryScaling::None,
        "linear" => RotaryScaling::Linear { factor },
        "llama3" => RotaryScaling::Llama3 {
            factor,
            low_freq_factor: number("low_freq_factor").unwrap(),
            high_freq_factor: number("high_freq_factor").unwrap(),
            original_max_len,
        },
        _ => RotaryScaling::Yarn {
            factor,
            original_max_len,
            beta_fast: number("beta_fast").unwrap_or(32.0),
            beta_slow: number("beta_slow").unwrap_or(1.0),
            attention_factor: number("attention_factor"),
            truncate: value["truncate"].as_bool().unwrap_or(true),
        },
    }
}

fn rotary(case: &Value) -> Result<Rotary> {
    let layout = match case["interleaved"].as_bool().unwrap() {
        true => RotaryLayout::Interleaved,
        false => RotaryLayout::HalfSplit,
    };
    let head_dim = case["head_dim"].as_u64().unwrap() as usize;
    let theta = case["theta"].as_f64().unwrap();
    let scaling = scaling(&case["scaling"]);
    let config = RotaryConfig { theta, layout, scaling, ..RotaryConfig::new(head_dim, 1024) };
    Ok(Rotary::new(&config, &Device::Cpu)?)
}

fn run(case: &Value, inputs: &[Tensor]) -> Result<Tensor> {
    match case["kind"].as_str().unwrap() {
        "rms_norm" => RmsNorm::new(inputs[1].clone(), case["eps"].as_f64().unwrap()).forward(&inputs[0]),
        "swiglu" => swiglu(&inputs[0], &inputs[1]),
        "geglu" => geglu(&inputs[0], &inputs[1]),
        "geglu_tanh" => geglu_tanh(&inputs[0], &inputs[1]),
        "rotary" => rotary(case)?.apply(&inputs[0], case["offset"].as_u64().unwrap() as usize),
        _ => {
            let (rows, _) = inputs[0].dims().split_at(inputs[0].rank() - 1);
            let targets: Vec<i64> = floats(&case["targets"]).iter().map(|&x| x as i64).collect();
            let targets = Tensor::from_vec(targets, rows, &Device::Cpu)?;
            let label_smoothing = case["smoothing"].as_f64().unwrap();
            let config =
                LinearCrossEntropyConfig { label_smoothing, chunk_rows: Some(3), ..Default::default() };
            linear_cross_entropy(&inputs[0], &inputs[1], inputs.get(2), &targets, &config)
        }
    }
}

#[test]
fn values_and_gradients_are_pytorchs() -> Result<()> {
    let fixture: Value = serde_json::from_str(include_str!("../fixtures/llama.json")).unwrap();
    let cases = fixture["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 38);
    for case in cases {
        for dtype in [DType::F32, DType::F64] {
            let of = |(numbers, shape): (&Value, &Value)| {
                Var::from_tensor(
                    &Tensor::from_vec(floats(numbers), sizes(shape), &Device::Cpu)?.to_dtype(dtype)?,
                )
            };
            let pairs = case["inputs"].as_array().unwrap().iter().zip(case["shapes"].as_array().unwrap());
            let vars: Vec<Var> = pairs.map(of).collect::<Result<_>>()?;
            let inputs: Vec<Tensor> = vars.iter().map(|var| var.as_tensor().clone()).collect();
            let y = run(case, &inputs)?;
            let what = format!("{} of {}, {} in {dtype:?}", case["kind"], case["shapes"], case["scaling"]);
            let found = gap(&y, &case["result"])?;
            assert!(found < 1e-6, "{what}: {found} off");
            let loss = if y.rank() == 0 {
                y
            } else {
                let count = y.elem_count();
                let outer = (0..count).map(|at| at as f64 * 2.0 / (count.max(2) - 1) as f64 - 1.0);
                let outer = Tensor::from_iter(outer, &Device::Cpu)?.reshape(y.shape())?.to_dtype(dtype)?;
                (y * outer)?.sum_all()?
            };
            let grads = loss.backward()?;
            for (index, (var, expected)) in vars.iter().zip(case["gradients"].as_array().unwrap()).enumerate()
            {
                let found = gap(grads.get(var).unwrap(), expected)?;
                assert!(found < 2e-6, "{what}: gradient {index} is {found} off");
            }
        }
    }
    Ok(())
}

fn random(shape: &[usize], dtype: DType) -> Result<Var> {
    Var::from_tensor(&Tensor::randn(0f32, 1., shape, &Device::Cpu)?.to_dtype(dtype)?)
}

/// An operation's name, its inputs, and the function that computes it.
type Operation = (&'static str, Vec<Var>, Box<dyn Fn(&[Var]) -> Result<Tensor> + Send + Sync>);

/// Operations on inputs large enough for several threads.
fn large(dtype: DType) -> Result<Vec<Operation>> {
    let (rows, width, classes) = (200, 300, 500);
    let var = |shape: &[usize]| random(shape, dtype);
    let rotary = Rotary::new(&RotaryConfig::new(30, rows), &Device::Cpu)?;
    let targets = Tensor::from_iter((0..rows).map(|row| (row * 7 % classes) as u32), &Device::Cpu)?;
    let config = LinearCrossEntropyConfig { chunk_rows: Some(70), ..Default::default() };
    Ok(vec![
        (
            "rms_norm",
            vec![var(&[rows, width])?, var(&[width])?],
            Box::new(|vars| RmsNorm::new(vars[1].as_tensor().clone(), 1e-5).forward(&vars[0])),
        ),
        ("rotary", vec![var(&[rows, width])?], Box::new(move |vars| rotary.apply(&vars[0], 0))),
        (
            "swiglu",
            vec![var(&[rows, width])?, var(&[rows, width])?],
            Box::new(|vars| swiglu(&vars[0], &vars[1])),
        ),
        (
            "geglu",
            vec![var(&[rows, width])?, var(&[rows, width])?],
            Box::new(|vars| geglu(&vars[0], &vars[1])),
        ),
        (
            "geglu_tanh",
            vec![var(&[rows, width])?, var(&[rows, width])?],
            Box::new(|vars| geglu_tanh(&vars[0], &vars[1])),
        ),
        (
            "linear_cross_entropy",
            vec![var(&[rows, width])?, var(&[classes, width])?, var(&[classes])?],
            Box::new(move |vars| linear_cross_entropy(&vars[0], &vars[1], Some(&vars[2]), &targets, &config)),
        ),
    ])
}

/// Bits of an operation's gradients and result.
fn bits(vars: &[Var], f: impl Fn(&[Var]) -> Result<Tensor>) -> Result<Vec<Vec<u32>>> {
    let y = f(vars)?;
    let grads = y.sqr()?.sum_all()?.backward()?;
    let tensors = vars.iter().map(|var| grads.get(var).unwrap()).chain([&y]);
    let bits = |x: &Tensor| {
        let numbers = x.flatten_all()?.to_dtype(DType::F32)?.to_vec1::<f32>()?;
        Ok(numbers.into_iter().map(f32::to_bits).collect())
    };
    tensors.map(bits).collect()
}

#[test]
fn any_number_of_threads_gives_the_same_bits() -> Result<()> {
    for (what, vars, f) in large(DType::F32)? {
        let with = |threads: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| bits(&vars, &f))
        };
        let alone = with(1)?;
        for threads in [2, 3, 8] {
            assert!(with(threads)? == alone, "{what} on {threads} threads");
        }
    }
    Ok(())
}

/// Products keep all digits of such operands; those of a loss's gradient are rounded as in `autocast`.
#[test]
fn half_types_are_computed_in_f32() -> Result<()> {
    for (dtype, precision) in [(DType::BF16, Precision::Bf16), (DType::F16, Precision::F32High)] {
        for (what, vars, f) in large(dtype)? {
            let wide: Vec<Var> =
                vars.iter().map(|var| Var::from_tensor(&var.to_dtype(DType::F32)?)).collect::<Result<_>>()?;
            let (y, expected) = (f(&vars)?, autocast(precision, || f(&wide))?);
            let is_loss = what == "linear_cross_entropy";
            assert_eq!(y.dtype(), if is_loss { DType::F32 } else { dtype }, "{what}");
            let same = |a: &Tensor, b: &Tensor| -> Result<bool> {
                let numbers =
                    |x: &Tensor| x.to_dtype(dtype)?.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>();
                Ok(numbers(a)? == numbers(b)?)
            };
            assert!(same(&y, &expected)?, "{what} in {dtype:?}");
            let (grads, expected) = (y.sum_all()?.backward()?, expected.sum_all()?.backward()?);
            for (var, wide) in vars.iter().zip(&wide) {
                let grad = grads.get(var).unwrap();
                assert_eq!(grad.dtype(), dtype, "{what}");
                assert!(same(grad, expected.get(wide).unwrap())?, "{what}: a gradient in {dtype:?}");
            }
        }
    }
    Ok(())
}

#[test]
fn backward_may_run_twice_and_needs_not_all() -> Result<()> {
    let (x, weight) = (random(&[4, 3], DType::F32)?, random(&[5, 3], DType::F32)?);
    let targets = Tensor::new(&[0u32, 4, 2, 1], &Device::Cpu)?;
    let config = LinearCrossEntropyConfig { chunk_rows: Some(3), ..Default::default() };
    let loss = linear_cross_entropy(&x, &weight, None, &targets, &config)?;
    let logits = x.matmul(&weight.t()?)?;
    let expected = cross_entropy(&logits, &targets, None)?.backward()?;
    let (one, two) = (loss.backward()?, (&loss * 2.0)?.backward()?);
    for var in [&x, &weight] {
        let gap = |grads: &candle_core::backprop::GradStore, by: f64| {
            let gap = ((expected.get(var).unwrap() * by)? - grads.get(var).unwrap())?;
            gap.abs()?.max_all()?.to_scalar::<f32>()
        };
        assert!(gap(&one, 1.0)? < 1e-6 && gap(&two, 2.0)? < 1e-6);
    }
    // With detached inputs there is no graph, and no gradient for them.
    let (data, weights) = (x.as_detached_tensor(), weight.as_detached_tensor());
    assert!(!linear_cross_entropy(&data, &weights, None, &targets, &config)?.track_op());
    let grads = linear_cross_entropy(&data, &weight, None, &targets, &config)?.backward()?;
    assert!(grads.get(&weight).is_some() && grads.get_id(data.id()).is_none());
    Ok(())
}

#[test]
fn ignored_rows_count_nothing_in_the_loss_and_for_x_whatever_they_hold() -> Result<()> {
    let x = Var::new(&[[f32::NAN, f32::INFINITY], [0., 0.]], &Device::Cpu)?;
    let weight = Tensor::ones((2, 2), DType::F32, &Device::Cpu)?;
    let targets = |numbers: &[i64]| Tensor::new(numbers, &Device::Cpu);
    let config = LinearCrossEntropyConfig::default();
    let loss = linear_cross_entropy(&x, &weight, None, &targets(&[-100, 1])?, &config)?;
    assert_eq!(loss.to_scalar::<f32>()?, 2f32.ln());
    assert_eq!(loss.backward()?.get(&x).unwrap().to_vec2::<f32>()?, [[0., 0.], [0., 0.]]);
    let nothing = linear_cross_entropy(&x, &weight, None, &targets(&[-100, -100])?, &config)?;
    assert!(nothing.to_scalar::<f32>()?.is_nan());
    Ok(())
}

#[test]
fn empty_tensors_stay_empty() -> Result<()> {
    let zeros = |dims: &[usize]| Tensor::zeros(dims, DType::F32, &Device::Cpu);
    assert_eq!(RmsNorm::new(zeros(&[3])?, 1e-5).forward(&zeros(&[0, 3])?)?.dims(), [0, 3]);
    assert_eq!(RmsNorm::new(zeros(&[0])?, 1e-5).forward(&zeros(&[2, 0])?)?.dims(), [2, 0]);
    assert_eq!(swiglu(&zeros(&[0, 2])?, &zeros(&[0, 2])?)?.dims(), [0, 2]);
    let rotary = Rotary::new(&RotaryConfig::new(2, 4), &Device::Cpu)?;
    assert_eq!(rotary.apply(&zeros(&[0, 3, 2])?, 1)?.dims(), [0, 3, 2]);
    assert_eq!(rotary.apply(&zeros(&[1, 0, 2])?, 4)?.dims(), [1, 0, 2]);
    let targets = Tensor::zeros(0, DType::U32, &Device::Cpu)?;
    let loss = linear_cross_entropy(&zeros(&[0, 3])?, &zeros(&[5, 3])?, None, &targets, &Default::default())?;
    assert!(loss.to_scalar::<f32>()?.is_nan());
    Ok(())
}

#[test]
fn layers_have_pytorchs_names_and_first_values() -> Result<()> {
    let vars = VarMap::new();
    let builder = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    let norm = rms_norm(4, 1e-6, builder.pp("input_layernorm"))?;
    let mlp = gated_mlp(4, 6, Gate::Silu, builder.pp("mlp"))?;
    let head = linear_no_bias(4, 5, builder.pp("lm_head"))?;
    assert_eq!((norm.weight().to_vec1::<f32>()?, norm.eps()), (vec![1.; 4], 1e-6));
    let named = vars.data().lock().unwrap().clone();
    let mut shapes: Vec<_> = named.iter().map(|(name, var)| (name.as_str(), var.dims())).collect();
    shapes.sort_unstable();
    assert_eq!(
        shapes,
        [
            ("input_layernorm.weight", &[4][..]),
            ("lm_head.weight", &[5, 4]),
            ("mlp.down_proj.weight", &[4, 6]),
            ("mlp.gate_proj.weight", &[6, 4]),
            ("mlp.up_proj.weight", &[6, 4]),
        ]
    );
    let x = random(&[2, 3, 4], DType::F32)?;
    let y = head.forward(&mlp.forward(&norm.forward(&x)?)?)?;
    let grads = y.sqr()?.sum_all()?.backward()?;
    assert!(vars.all_vars().iter().all(|var| grads.get(var).is_some()));
    Ok(())
}

/// Asserts that each message is one line and contains its parts.
fn check(cases: impl IntoIterator<Item = (String, [&'static str; 2])>) {
    for (message, parts) in cases {
        assert!(parts.iter().all(|part| message.contains(part)) && !message.contains('\n'), "{message}");
    }
}

fn zeros(dims: &[usize], dtype: DType) -> Tensor {
    Tensor::zeros(dims, dtype, &Device::Cpu).unwrap()
}

fn f32s(dims: &[usize]) -> Tensor {
    zeros(dims, DType::F32)
}

#[test]
fn misfits_of_norms_and_gates_are_one_clear_line() {
    let norm = |weight: Tensor, x: Tensor| RmsNorm::new(weight, 1e-5).forward(&x).unwrap_err().to_string();
    let gate = |gate: Gate, x: Tensor, up: Tensor| gate.apply(&x, &up).unwrap_err().to_string();
    let whole = |dtype| zeros(&[2], dtype);
    check([
        (norm(f32s(&[2]), f32s(&[1, 3])), ["rms_norm", "[3]"]),
        (norm(f32s(&[3]), zeros(&[1, 3], DType::F64)), ["weight is F32", "F64"]),
        (norm(zeros(&[3], DType::U32), zeros(&[1, 3], DType::U32)), ["rms_norm takes", "U32"]),
        (norm(f32s(&[]), f32s(&[])), ["weight", "[]"]),
        (gate(Gate::Silu, f32s(&[2]), f32s(&[3])), ["swiglu: up must be of shape [2]", "[3]"]),
        (gate(Gate::Gelu, f32s(&[2]), whole(DType::BF16)), ["geglu: up", "BF16"]),
        (gate(Gate::GeluTanh, whole(DType::U8), whole(DType::U8)), ["geglu_tanh takes", "U8"]),
    ]);
}

#[test]
fn misfits_of_rotary_embedding_are_one_clear_line() -> Result<()> {
    let table = |config: RotaryConfig| Rotary::new(&config, &Device::Cpu).unwrap_err().to_string();
    let rotary = Rotary::new(&RotaryConfig::new(4, 8), &Device::Cpu)?;
    let turn = |x: Tensor, offset| rotary.apply(&x, offset).unwrap_err().to_string();
    let scaled = |scaling| table(RotaryConfig { scaling, ..RotaryConfig::new(4, 8) });
    let llama3 =
        RotaryScaling::Llama3 { factor: 8., low_freq_factor: 4., high_freq_factor: 4., original_max_len: 8 };
    let yarn = RotaryScaling::Yarn {
        factor: 8.,
        original_max_len: 0,
        beta_fast: 32.,
        beta_slow: 1.,
        attention_factor: None,
        truncate: true,
    };
    check([
        (table(RotaryConfig::new(5, 8)), ["head_dim is 5", "even"]),
        (table(RotaryConfig::new(4, 0)), ["max_len is 0", "position"]),
        (table(RotaryConfig { theta: 1.0, ..RotaryConfig::new(4, 8) }), ["theta is 1", "above 1"]),
        (scaled(RotaryScaling::Linear { factor: 0. }), ["factor is 0", "above 0"]),
        (scaled(llama3), ["high_freq_factor is 4", "low_freq_factor"]),
        (scaled(yarn), ["original_max_len is 0", "above 0"]),
        (turn(f32s(&[1, 3, 4]), 6), ["3 positions from 6 on", "table of 8"]),
        (turn(f32s(&[1, 1, 4]), usize::MAX), ["1 positions from", "table of 8"]),
        (turn(f32s(&[1, 3, 6]), 0), ["[1, 3, 8]", "got [1, 3, 6]"]),
        (turn(f32s(&[4]), 0), ["rotary: x", "got [4]"]),
        (turn(zeros(&[1, 3, 4], DType::I64), 0), ["rotary takes", "I64"]),
    ]);
    Ok(())
}

#[test]
fn misfits_of_the_chunked_loss_are_one_clear_line() -> Result<()> {
    let targets = Tensor::new(&[0u32, 4], &Device::Cpu)?;
    let configured = |x: &[usize], weight: &[usize], config| {
        linear_cross_entropy(&f32s(x), &f32s(weight), None, &targets, &config).unwrap_err().to_string()
    };
    let loss = |x: &[usize], weight: &Tensor, bias: Option<&Tensor>, targets: &Tensor| {
        linear_cross_entropy(&f32s(x), weight, bias, targets, &Default::default()).unwrap_err().to_string()
    };
    let (weight, bias) = (f32s(&[5, 3]), f32s(&[3]));
    let smoothed = LinearCrossEntropyConfig { label_smoothing: 1.5, ..Default::default() };
    let no_rows = LinearCrossEntropyConfig { chunk_rows: Some(0), ..Default::default() };
    check([
        (loss(&[2, 3], &f32s(&[5, 4]), None, &targets), ["weight must be of shape [5, 3]", "[5, 4]"]),
        (loss(&[2, 3], &weight, Some(&bias), &targets), ["bias", "[5]"]),
        (loss(&[2, 3], &zeros(&[5, 3], DType::F64), None, &targets), ["weight is F64", "F32"]),
        (loss(&[2, 3], &f32s(&[4, 3]), None, &targets), ["row 1 is 4", "4 classes"]),
        (loss(&[3, 3], &weight, None, &targets), ["targets", "[3]"]),
        (loss(&[2, 3], &weight, None, &f32s(&[2])), ["targets", "F32"]),
        (loss(&[], &weight, None, &targets), ["x must be", "[]"]),
        (configured(&[2, 3], &[5, 3], smoothed), ["label_smoothing is 1.5", "0 to 1"]),
        (configured(&[2, 3], &[5, 3], no_rows), ["chunk_rows is 0", "row"]),
    ]);
    Ok(())
}
