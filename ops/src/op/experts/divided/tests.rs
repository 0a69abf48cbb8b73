//! The exchange beside which something else is computed.

use candle_core::Module;
use candle_core::backprop::GradStore;

use super::*;
use crate::tape::{add, explicit_op1, scalar_with_gradient};
use crate::{Experts, Gate, Linear, Router, backward, recompute, recompute_cheap};

/// One rank, which notes when rows are sent and waited for.
#[derive(Debug, Clone, Default)]
struct Noted(Arc<Mutex<Vec<&'static str>>>);

impl Noted {
    fn note(&self, what: &'static str) {
        self.0.lock().unwrap().push(what);
    }

    fn taken(&self) -> Vec<&'static str> {
        std::mem::take(&mut *self.0.lock().unwrap())
    }
}

impl ExpertExchange for Noted {
    fn rank(&self) -> usize {
        0
    }

    fn ranks(&self) -> usize {
        1
    }

    fn numbers(&self, own: &[u32]) -> Result<Vec<Vec<u32>>> {
        Ok(vec![own.to_vec()])
    }

    fn rows(&self, rows: &Tensor, _: &[usize], _: &[usize]) -> Result<Tensor> {
        self.note("both");
        rows.force_contiguous()
    }

    fn start_rows(&self, rows: &Tensor, _: &[usize], _: &[usize]) -> Result<RowsOnTheWay> {
        self.note("send");
        let (rows, noted) = (rows.force_contiguous()?, self.clone());
        Ok(Box::new(move || {
            noted.note("wait");
            Ok(rows)
        }))
    }
}

/// Both passes compute what is beside while rows are on the way, and no bit is another one than one after the other.
#[test]
fn what_is_beside_comes_between_sending_and_waiting() -> Result<()> {
    let random = |dims: [usize; 2]| Var::from_tensor(&Tensor::randn(0f32, 0.5, &dims[..], &Device::Cpu)?);
    let (x, router, shared) = (random([9, 6])?, random([5, 6])?, [random([6, 6])?, random([6, 6])?]);
    let weights = (0..5).map(|_| Ok([random([8, 6])?, random([8, 6])?, random([6, 8])?]));
    let weights = weights.collect::<Result<Vec<_>>>()?;
    let tensors = weights.iter().map(|of| of.each_ref().map(|var| var.as_tensor().clone())).collect();
    let noted = Noted::default();
    let divided = DividedExperts::new(5, Arc::new(noted.clone()))?;
    let experts = Experts::new(tensors, Gate::Silu)?.divided(divided)?;
    let scores = Linear::new(router.as_tensor().clone(), None);
    let [first, second] = shared.each_ref().map(|var| Linear::new(var.as_tensor().clone(), None));
    let layer = |is_beside: bool| {
        let (noted, experts, scores) = (noted.clone(), experts.clone(), scores.clone());
        let (first, second) = (first.clone(), second.clone());
        move |x: &Tensor| {
            let routes = Router::new("gate", 3)?.route(&scores.forward(x)?)?;
            let beside = || {
                noted.note("beside");
                let y = add(&first.forward(x)?, &second.forward(x)?)?;
                let noted = noted.clone();
                explicit_op1("noted", [&y], y.force_contiguous()?.detach(), move |_, gradient| {
                    noted.note("back");
                    Ok([Some(gradient.clone())])
                })
            };
            let (routed, beside) = match is_beside {
                true => experts.forward_beside(x, &routes, beside)?,
                false => (experts.forward(x, &routes)?, beside()?),
            };
            add(&routed, &beside)
        }
    };
    let all: Vec<&Var> = [&x, &router].into_iter().chain(&shared).chain(weights.iter().flatten()).collect();
    let bits_by = |y: Tensor, backward: fn(&Tensor) -> Result<GradStore>| {
        let grads = backward(&scalar_with_gradient(&y, y.detach())?)?;
        let of = all.iter().map(|var| grads.get(var).unwrap().flatten_all()?.to_vec1::<f32>());
        of.chain([y.flatten_all()?.to_vec1()]).collect::<Result<Vec<_>>>()
    };
    let bits = |y: Tensor| bits_by(y, backward);
    let expected = bits(layer(false)(&x)?)?;
    noted.taken();
    let y = layer(true)(&x)?;
    assert_eq!(noted.taken(), ["send", "beside", "wait", "both"]);
    assert_eq!(bits(y)?, expected);
    assert_eq!(noted.taken(), ["both", "send", "back", "wait"]);
    // candle's own backward takes the operations in the same order.
    assert_eq!(bits_by(layer(true)(&x)?, Tensor::backward)?, bits_by(layer(false)(&x)?, Tensor::backward)?);
    noted.taken();
    assert_eq!(bits(recompute(&x, layer(true))?)?, expected);
    noted.taken();
    assert_eq!(bits(recompute_cheap(&x, layer(true))?)?, expected);
    // What arrived is kept, and not sent again.
    let (sent, again) = (["send", "beside", "wait", "both"], ["beside", "both", "send", "back", "wait"]);
    assert_eq!(noted.taken(), [&sent[..], &again].concat());
    Ok(())
}

/// Backward comes to both exchanges where this rank trains nothing before the experts.
#[test]
fn rows_without_gradients_go_back_all_the_same() -> Result<()> {
    let noted = Noted::default();
    let divided = DividedExperts::new(1, Arc::new(noted.clone()))?;
    let ones = |dims: [usize; 2]| Tensor::ones(&dims[..], DType::F32, &Device::Cpu);
    let trained = Var::from_tensor(&ones([4, 3])?)?;
    let weights = [trained.as_tensor().clone(), ones([4, 3])?, ones([3, 4])?];
    let experts = Experts::new(vec![weights], Gate::Silu)?.divided(divided)?;
    let (x, routes) = (ones([2, 3])?, Router::new("gate", 1)?.route(&ones([2, 1])?)?);
    let (routed, beside) = experts.forward_beside(&x, &routes, || x.affine(2.0, 0.0))?;
    noted.taken();
    assert!(backward(&add(&routed, &beside)?.sum_all()?)?.get(&trained).is_some());
    assert_eq!(noted.taken(), ["both", "send", "wait"]);
    Ok(())
}
