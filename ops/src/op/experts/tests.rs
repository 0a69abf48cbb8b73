//! Equality with experts composed of candle's operations, one token and one expert at a time.

use candle_core::{DType, Device, Module, Result, Tensor, Var};

use super::super::assert_agree;
use super::*;
use crate::quantized::{Format, QuantizedMatrix, QuantizedPart};
use crate::{
    Balance, BalanceConfig, BalanceLoss, Linear, Precision, RowContext, autocast, backward, defer_weights,
    recompute, recompute_cheap,
};

/// Numbers of experts, experts of a token, and tokens.
const SIZES: [[usize; 3]; 6] = [[5, 2, 7], [8, 3, 33], [3, 3, 4], [6, 1, 1], [7, 2, 40], [1, 1, 3]];

struct Case {
    x: Var,
    router: Var,
    weights: Vec<[Var; 3]>,
    per_token: usize,
    normalized: bool,
}

impl Case {
    fn new([count, per_token, tokens]: [usize; 3], normalized: bool, dtype: DType) -> Result<Self> {
        let random = |dims: [usize; 2]| {
            Var::from_tensor(&Tensor::randn(0f64, 0.5, &dims[..], &Device::Cpu)?.to_dtype(dtype)?)
        };
        let expert = |_| Ok([random([9, 6])?, random([9, 6])?, random([6, 9])?]);
        let weights = (0..count).map(expert).collect::<Result<_>>()?;
        Ok(Self { x: random([tokens, 6])?, router: random([count, 6])?, weights, per_token, normalized })
    }

    /// The same numbers in f64.
    fn wide(&self) -> Result<Self> {
        let wide = |var: &Var| Var::from_tensor(&var.to_dtype(DType::F64)?);
        let weights = self.weights.iter().map(|[a, b, c]| Ok([wide(a)?, wide(b)?, wide(c)?]));
        let weights = weights.collect::<Result<_>>()?;
        let (x, router, per_token) = (wide(&self.x)?, wide(&self.router)?, self.per_token);
        Ok(Self { x, router, weights, per_token, normalized: self.normalized })
    }

    fn vars(&self) -> Vec<&Var> {
        [&self.x, &self.router].into_iter().chain(self.weights.iter().flatten()).collect()
    }

    fn layer(&self) -> Result<impl Fn(&Tensor) -> Result<Tensor> + Send + Sync + Clone + 'static> {
        let weights = self.weights.iter().map(|of| of.each_ref().map(|var| var.as_tensor().clone()));
        let experts = Experts::new(weights.collect(), Gate::Silu)?;
        let router = Router::new("gate", self.per_token)?.normalized(self.normalized);
        let scores = Linear::new(self.router.as_tensor().clone(), None);
        Ok(move |x: &Tensor| experts.forward(x, &router.route(&scores.forward(x)?)?))
    }

    fn fused(&self) -> Result<Tensor> {
        self.layer()?(&self.x)
    }

    /// Each token's experts, one after the other.
    fn composed(&self) -> Result<Tensor> {
        let shares = candle_nn::ops::softmax(&self.x.matmul(&self.router.t()?)?, 1)?;
        let values = shares.to_dtype(DType::F64)?.to_vec2::<f64>()?;
        let mut rows = Vec::new();
        for (token, values) in values.iter().enumerate() {
            let mut order: Vec<usize> = (0..values.len()).collect();
            order.sort_by(|a, b| values[*b].total_cmp(&values[*a]));
            let (x, mut sum, mut total) = (self.x.narrow(0, token, 1)?, None::<Tensor>, None::<Tensor>);
            for &expert in &order[..self.per_token] {
                let [gate, up, down] = &self.weights[expert];
                let inner = (x.matmul(&gate.t()?)?.silu()? * x.matmul(&up.t()?)?)?;
                let share = shares.narrow(0, token, 1)?.narrow(1, expert, 1)?;
                let own = inner.matmul(&down.t()?)?.broadcast_mul(&share)?;
                sum = Some(sum.map_or(Ok(own.clone()), |sum| sum + &own)?);
                total = Some(total.map_or(Ok(share.clone()), |total| total + &share)?);
            }
            let (sum, total) = (sum.unwrap(), total.unwrap());
            rows.push(if self.normalized { sum.broadcast_div(&total)? } else { sum });
        }
        // So that experts without tokens have a gradient, too.
        let all = self
            .weights
            .iter()
            .flatten()
            .try_fold(Tensor::zeros((), DType::F64, &Device::Cpu)?, |all, var| {
                all + (var.as_tensor() * var.zeros_like()?)?.sum_all()?
            })?;
        Tensor::cat(&rows, 0)?.broadcast_add(&all)
    }
}

#[test]
fn results_and_gradients_are_those_of_single_tokens() -> Result<()> {
    for sizes in SIZES {
        for normalized in [false, true] {
            let case = Case::new(sizes, normalized, DType::F64)?;
            let outer = Tensor::randn(0f64, 1.0, case.x.dims(), &Device::Cpu)?;
            let both = [case.fused()?, case.composed()?];
            assert_agree(both, |y| (y * &outer)?.sum_all(), &case.vars(), 1e-10, &format!("{sizes:?}"))?;
        }
    }
    Ok(())
}

/// All of them are chosen by no token but one, whose gradient is zeros and not missing.
#[test]
fn an_expert_without_tokens_has_zeros() -> Result<()> {
    let case = Case::new([5, 1, 6], false, DType::F64)?;
    // Every token prefers the last expert.
    case.x.set(&case.x.abs()?)?;
    let router = Tensor::zeros((4, 6), DType::F64, &Device::Cpu)?;
    case.router.set(&Tensor::cat(&[&router, &Tensor::ones((1, 6), DType::F64, &Device::Cpu)?], 0)?)?;
    let y = case.fused()?;
    for grads in [backward(&y.sum_all()?)?, y.sum_all()?.backward()?] {
        for (expert, weights) in case.weights.iter().enumerate() {
            for weight in weights {
                let largest = grads.get(weight).unwrap().abs()?.max_all()?.to_scalar::<f64>()?;
                assert_eq!(largest > 0.0, expert == 4, "{expert}");
            }
        }
    }
    Ok(())
}

#[test]
fn recomputation_and_deferred_weights_change_no_bit() -> Result<()> {
    let case = Case::new([5, 2, 40], true, DType::F32)?;
    let layer = case.layer()?;
    let numbers = |grads: candle_core::backprop::GradStore| {
        let of = |var: &&Var| grads.get(var).unwrap().flatten_all()?.to_vec1::<f32>();
        case.vars().iter().map(of).collect::<Result<Vec<_>>>()
    };
    let plain = numbers(backward(&layer(&case.x)?.sqr()?.sum_all()?)?)?;
    assert_eq!(numbers(backward(&layer(&case.x)?.sqr()?.sum_all()?)?)?, plain);
    for y in [recompute(&case.x, layer.clone())?, recompute_cheap(&case.x, layer.clone())?] {
        assert_eq!(numbers(backward(&y.sqr()?.sum_all()?)?)?, plain);
    }
    let (mut grads, deferred) = defer_weights(|| backward(&layer(&case.x)?.sqr()?.sum_all()?))?;
    assert!(case.weights.iter().flatten().all(|var| grads.get(var).is_none()));
    deferred.compute(|id, gradient| {
        let var = case.vars().into_iter().find(|var| var.id() == id).unwrap();
        grads.insert(var, gradient);
        Ok(())
    })?;
    assert_eq!(numbers(grads)?, plain);
    Ok(())
}

/// Weights that are others by then change nothing of what was kept.
#[test]
fn kept_products_are_not_computed_again() -> Result<()> {
    let case = Case::new([5, 2, 40], true, DType::F32)?;
    let numbers = |y: &Tensor, var: &Var| {
        let grads = backward(&y.sqr()?.sum_all()?)?;
        grads.get(var).unwrap().flatten_all()?.to_vec1::<f32>()
    };
    let down = &case.weights[0][2];
    let plain = numbers(&case.fused()?, down)?;
    let y = recompute_cheap(&case.x, case.layer()?)?;
    for [gate, up, _] in &case.weights {
        gate.set(&gate.zeros_like()?)?;
        up.set(&up.zeros_like()?)?;
    }
    assert!(plain.iter().any(|x| *x != 0.0));
    assert_eq!(numbers(&y, down)?, plain);
    Ok(())
}

#[test]
fn frozen_experts_get_no_gradient() -> Result<()> {
    let case = Case::new([4, 2, 5], false, DType::F64)?;
    let weights = case.weights.iter().map(|of| of.each_ref().map(|var| var.detach()));
    let experts = Experts::new(weights.collect(), Gate::Silu)?;
    let routes = Router::new("gate", 2)?.route(&case.x.matmul(&case.router.t()?)?)?;
    let grads = backward(&experts.forward(&case.x, &routes)?.sum_all()?)?;
    assert!(grads.get(&case.x).is_some() && grads.get(&case.router).is_some());
    assert!(case.weights.iter().flatten().all(|var| grads.get(var).is_none()));
    Ok(())
}

/// 16 bits are those of f64, rounded: as in dense layers.
#[test]
fn sixteen_bits_equal_f64_to_their_digits() -> Result<()> {
    for (dtype, digits) in [(DType::BF16, 8), (DType::F16, 11)] {
        let case = Case::new([5, 2, 20], true, dtype)?;
        let exact = case.wide()?;
        let of = |case: &Case| {
            let y = case.fused()?;
            let grads = y.to_dtype(DType::F64)?.sqr()?.sum_all()?.backward()?;
            let vars = case.vars().into_iter().map(|var| grads.get(var).unwrap().to_dtype(DType::F64));
            vars.chain([y.to_dtype(DType::F64)]).collect::<Result<Vec<_>>>()
        };
        for (rounded, exact) in of(&case)?.iter().zip(&of(&exact)?) {
            let gap = (rounded - exact)?.abs()?.max_all()?.to_scalar::<f64>()?;
            let largest = exact.abs()?.max_all()?.to_scalar::<f64>()?;
            assert!(gap <= 16.0 * 0.5f64.powi(digits) * largest.max(0.1), "{dtype:?}: {gap} of {largest}");
        }
    }
    Ok(())
}

#[test]
fn precision_is_that_of_the_scope() -> Result<()> {
    let case = Case::new([3, 2, 20], false, DType::F32)?;
    let (exact, rounded) = (case.fused()?, autocast(Precision::Bf16, || case.fused())?);
    let gap = (exact - rounded)?.abs()?.max_all()?.to_scalar::<f32>()?;
    assert!(gap > 0.0 && gap < 0.1, "{gap}");
    Ok(())
}

#[test]
fn misfits_are_named() -> Result<()> {
    let line = |error: candle_core::Error| error.to_string();
    let zeros = |dims: &[usize]| Tensor::zeros(dims, DType::F32, &Device::Cpu);
    assert!(line(Router::new("gate", 0).unwrap_err()).contains("the number of experts of a token is 0"));
    let router = Router::new("gate", 3)?;
    assert!(line(router.route(&zeros(&[2, 2])?).unwrap_err()).contains("at most the number of experts"));
    assert!(Experts::new(Vec::new(), Gate::Silu).is_err());
    let expert = || Ok::<_, candle_core::Error>([zeros(&[4, 2])?, zeros(&[4, 2])?, zeros(&[2, 4])?]);
    let odd = [zeros(&[4, 2])?, zeros(&[4, 3])?, zeros(&[2, 4])?];
    let error = line(Experts::new(vec![expert()?, odd], Gate::Silu).unwrap_err());
    assert!(error.contains("experts: up must be of shape [4, 2], got [4, 3]"), "{error}");
    let experts = Experts::new(vec![expert()?; 3], Gate::Silu)?;
    let routes = router.route(&zeros(&[2, 3])?)?;
    let error = line(experts.forward(&zeros(&[3, 2])?, &routes).unwrap_err());
    assert!(error.contains("the input must be of shape [2, 2], got [3, 2]"), "{error}");
    let error = line(experts.forward(&zeros(&[2, 2])?, &router.route(&zeros(&[2, 4])?)?).unwrap_err());
    assert!(error.contains("give a score for each expert"), "{error}");
    Ok(())
}

/// Sigmoids in groups, with a correction: which experts are chosen, and the gradients of weights and of the balance loss, are those
/// of the formulas.
#[test]
fn sigmoids_groups_and_correction_are_the_formulas() -> Result<()> {
    let (rows, tokens, count) = (2, 5, 6);
    let scores = Var::from_tensor(&Tensor::randn(0f64, 1.0, (rows, tokens, count), &Device::Cpu)?)?;
    let correction = Tensor::new(&[0.4f64, 0., -0.3, 0., 0.2, 0.], &Device::Cpu)?;
    let outer = Tensor::randn(0f64, 1.0, (rows * tokens, 2), &Device::Cpu)?;
    let router = Router::new("gate", 2)?.scoring(Scoring::Sigmoid).normalized(true).scaled(2.5);
    let router = router.groups(3, 2).corrected(correction.clone());
    let config = BalanceConfig { loss: Some(BalanceLoss::Row), weight: 0.7, ..BalanceConfig::new(count) };
    let balance = Balance::new(config);
    let context = RowContext { balance: Some(balance.clone()), ..RowContext::default() };
    let routes = context.scope(|| router.route(&scores))?;
    balance.end_forward()?;

    let shares = candle_nn::ops::sigmoid(&scores.flatten_to(1)?)?;
    let corrected = shares.detach().broadcast_add(&correction)?.to_vec2::<f64>()?;
    for (all, chosen) in corrected.iter().zip(routes.experts().chunks(2)) {
        let sum = |group: &usize| all[2 * group] + all[2 * group + 1];
        let worst = (0..3).min_by(|a, b| sum(a).total_cmp(&sum(b))).unwrap();
        let mut order: Vec<usize> = (0..count).filter(|expert| expert / 2 != worst).collect();
        order.sort_by(|a, b| all[*b].total_cmp(&all[*a]));
        assert_eq!(chosen, [order[0] as u32, order[1] as u32]);
    }
    let experts = Tensor::from_slice(routes.experts(), (rows * tokens, 2), &Device::Cpu)?;
    let chosen = shares.gather(&experts, 1)?;
    let weights = (chosen.broadcast_div(&chosen.sum_keepdim(1)?)? * 2.5)?;
    let probabilities = shares.broadcast_div(&shares.sum_keepdim(1)?)?.reshape((rows, tokens, count))?;
    let ones = Tensor::ones((rows * tokens, 2), DType::F64, &Device::Cpu)?;
    let counts = shares.zeros_like()?.scatter_add(&experts, &ones, 1)?.reshape((rows, tokens, count))?;
    let of_rows = (counts.sum(1)? * probabilities.sum(1)?)?.sum_all()?;
    let loss = (of_rows * (0.7 * count as f64 / (2.0 * (tokens * tokens) as f64)))?;
    assert!((loss.to_scalar::<f64>()? - balance.loss()?).abs() < 1e-12);
    let expected = ((&weights * &outer)?.sum_all()? + loss)?.backward()?;
    let found = backward(&(routes.weights() * &outer)?.sum_all()?)?;
    let gap = |a: &Tensor, b: &Tensor| (a - b)?.abs()?.max_all()?.to_scalar::<f64>();
    assert!(gap(routes.weights(), &weights)? < 1e-12);
    assert!(gap(found.get(&scores).unwrap(), expected.get(&scores).unwrap())? < 1e-12);
    Ok(())
}

#[test]
fn groups_and_corrections_that_cannot_be_are_named() -> Result<()> {
    let scores = Tensor::zeros((2, 6), DType::F32, &Device::Cpu)?;
    let line = |router: Router| router.route(&scores).unwrap_err().to_string();
    let router = || Router::new("gate", 3);
    for (groups, used, said) in
        [(4, 1, "groups is 4"), (6, 1, "two"), (3, 1, "groups of a token is 1"), (2, 3, "a token is 3")]
    {
        let line = line(router()?.groups(groups, used));
        assert!(line.contains(said), "{line}");
    }
    let short = Tensor::zeros(5, DType::F32, &Device::Cpu)?;
    assert!(line(router()?.corrected(short)).contains("the correction is 5"));
    let nan = Tensor::full(f32::NAN, 6, &Device::Cpu)?;
    assert!(line(router()?.corrected(nan)).contains("gate: the scores of experts are not finite"));
    Ok(())
}

/// Adapters add to the weights what the product of their matrices is, in forward and backward.
#[test]
fn adapters_are_added_to_the_weights() -> Result<()> {
    let scale = 1.7;
    for (number, [count, per_token, tokens]) in SIZES.into_iter().enumerate() {
        let case = Case::new([count, per_token, tokens], true, DType::F64)?;
        let random = |rows: usize, columns: usize| {
            Var::from_tensor(&Tensor::randn(0f64, 0.5, (rows, columns), &Device::Cpu)?)
        };
        // One of both, or both; gate and up are one layer of 18 outputs.
        let (has_inner, has_outer) = (number % 3 != 1, number % 3 != 2);
        let matrices = (0..count).map(|_| Ok([random(2, 6)?, random(18, 2)?, random(3, 9)?, random(6, 3)?]));
        let matrices: Vec<[Var; 4]> = matrices.collect::<Result<_>>()?;
        let tensor = |var: &Var| var.as_tensor().clone();
        let adapted = case.weights.iter().zip(&matrices).map(|(weights, [a, b, c, d])| {
            let adapter = |a: &Var, b: &Var| ExpertAdapter { a: tensor(a), b: tensor(b), scale };
            let frozen = weights.each_ref().map(|var| ExpertWeight::Wide(var.as_detached_tensor()));
            let (gate_up_adapter, down_adapter) =
                (has_inner.then(|| adapter(a, b)), has_outer.then(|| adapter(c, d)));
            Expert { gate_up_adapter, down_adapter, ..Expert::new(frozen) }
        });
        let adapted = Experts::of(adapted.collect(), Gate::Silu)?;
        let merged = case.weights.iter().zip(&matrices).map(|([gate, up, down], [a, b, c, d])| {
            let add = |weight: &Var, a: &Tensor, b: &Tensor, has: bool| match has {
                true => weight.as_detached_tensor() + b.matmul(a)?.affine(scale, 0.0)?,
                false => Ok(weight.as_detached_tensor()),
            };
            Ok([
                add(gate, a, &b.narrow(0, 0, 9)?, has_inner)?,
                add(up, a, &b.narrow(0, 9, 9)?, has_inner)?,
                add(down, c, d, has_outer)?,
            ])
        });
        let merged = Experts::new(merged.collect::<Result<_>>()?, Gate::Silu)?;
        let scores = Linear::new(case.router.as_detached_tensor(), None);
        let router = Router::new("gate", per_token)?;
        let weighted = Tensor::randn(0f64, 1.0, (tokens, 6), &Device::Cpu)?;
        let run = |experts: &Experts| {
            let y = experts.forward(&case.x, &router.route(&scores.forward(&case.x)?)?)?;
            Ok::<_, candle_core::Error>((y.detach(), backward(&(y * &weighted)?.sum_all()?)?))
        };
        let ((y, grads), (expected_y, expected)) = (run(&adapted)?, run(&merged)?);
        let gap = |a: &Tensor, b: &Tensor| (a - b)?.abs()?.max_all()?.to_scalar::<f64>();
        assert!(gap(&y, &expected_y)? < 1e-12);
        let own = matrices
            .iter()
            .flat_map(|[a, b, c, d]| [(a, has_inner), (b, has_inner), (c, has_outer), (d, has_outer)]);
        for (var, has) in own.chain([(&case.x, true)]) {
            assert_eq!(grads.get(var).is_some(), has);
            let zeros = var.zeros_like()?;
            let (got, expected) = (grads.get(var).unwrap_or(&zeros), expected.get(var).unwrap_or(&zeros));
            assert!(gap(got, expected)? < 1e-11, "{count} experts, {:?}", var.dims());
        }
        assert!(case.weights.iter().flatten().all(|weight| grads.get(weight).is_none()));
    }
    Ok(())
}

/// Experts in few bits are those of the widened weights, and have no gradient.
#[test]
fn experts_in_few_bits_are_those_of_widened_weights() -> Result<()> {
    for format in [Format::Nf4, Format::Int8] {
        let random = |rows: usize, columns: usize| Tensor::randn(0f32, 0.5, (rows, columns), &Device::Cpu);
        let (mut quantized, mut widened) = (Vec::new(), Vec::new());
        for _ in 0..4 {
            let all = [random(128, 64)?, random(128, 64)?, random(64, 128)?];
            let matrices = all.each_ref().map(|weight| QuantizedMatrix::quantize(format, weight));
            let [gate, up, down] = matrices;
            let matrices = [gate?, up?, down?];
            let [gate, up, down] = matrices.each_ref().map(QuantizedMatrix::widen);
            widened.push([gate?, up?, down?]);
            let part = |matrix: &QuantizedMatrix| {
                let (columns, scales) = (matrix.columns(), matrix.scales());
                let bytes = format.row_bytes(columns)?;
                let rows = matrix.blocks().len() / bytes;
                Ok::<_, candle_core::Error>(ExpertWeight::Quantized(QuantizedPart {
                    format,
                    blocks: Tensor::from_slice(matrix.blocks(), (rows, bytes), &Device::Cpu)?,
                    scales: Tensor::from_slice(&scales, scales.len(), &Device::Cpu)?,
                    rows: (0..rows).map(|row| row * format.scales_per_row(columns)).collect(),
                }))
            };
            let [gate, up, down] = matrices.each_ref().map(part);
            quantized.push(Expert::new([gate?, up?, down?]));
        }
        let both = [Experts::of(quantized, Gate::Silu)?, Experts::new(widened, Gate::Silu)?];
        let x = Var::from_tensor(&random(50, 64)?)?;
        let routes = Router::new("gate", 2)?.route(&random(50, 4)?)?;
        let [(y, own), (expected_y, expected)] = both.map(|experts| {
            let y = experts.forward(&x, &routes).unwrap();
            let grads = backward(&y.sqr().unwrap().sum_all().unwrap()).unwrap();
            (y.detach(), grads.get(&x).unwrap().clone())
        });
        for (got, expected) in [(y, expected_y), (own, expected)] {
            let (gap, size) = ((got - &expected)?.abs()?.max_all()?, expected.abs()?.max_all()?);
            assert!(gap.to_scalar::<f32>()? < 1e-5 * size.to_scalar::<f32>()?, "{format:?}: {gap}");
        }
    }
    Ok(())
}
