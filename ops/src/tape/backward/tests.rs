//! Tests of backward against candle's own.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use candle_core::{CpuStorage, CustomOp1, CustomOp2, Layout, Shape, Var};

use super::*;
use crate::tape::{add, apply_op1, apply_op2};

/// `x * y` in f64.
struct Product;

fn numbers(x: &CpuStorage, layout: &Layout) -> Result<Vec<f64>> {
    let (start, end) = layout.contiguous_offsets().expect("dense numbers");
    Ok(x.as_slice::<f64>()?[start..end].to_vec())
}

impl CustomOp2 for Product {
    fn name(&self) -> &'static str {
        "product"
    }

    fn cpu_fwd(&self, x: &CpuStorage, l: &Layout, y: &CpuStorage, m: &Layout) -> Result<(CpuStorage, Shape)> {
        let product = numbers(x, l)?.iter().zip(numbers(y, m)?).map(|(x, y)| x * y).collect();
        Ok((CpuStorage::F64(product), l.shape().clone()))
    }

    fn bwd(
        &self,
        x: &Tensor,
        y: &Tensor,
        _: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        Ok((Some((gradient * y)?), Some((gradient * x)?)))
    }
}

/// Sum of all elements, in f64.
struct Total;

impl CustomOp1 for Total {
    fn name(&self) -> &'static str {
        "total"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        Ok((CpuStorage::F64(vec![numbers(x, layout)?.iter().sum()]), Shape::from(())))
    }

    fn bwd(&self, x: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        // A broadcast view of one element.
        gradient.broadcast_as(x.shape()).map(Some)
    }
}

fn product(x: &Tensor, y: &Tensor) -> Result<Tensor> {
    apply_op2(x, y, Product)
}

fn total(x: &Tensor) -> Result<Tensor> {
    apply_op1(x, Total)
}

fn vars<const N: usize>() -> Result<[Var; N]> {
    let mut vars = Vec::new();
    for _ in 0..N {
        // Integers, so that sums do not depend on the order.
        vars.push(Var::from_tensor(&Tensor::randn(0f64, 3.0, (3, 4), &Device::Cpu)?.round()?)?);
    }
    Ok(vars.try_into().expect("as many"))
}

/// Asserts whether backward uses its own pass for this graph (`is_own`), and that its gradients equal candle's.
fn check(loss: &Tensor, vars: &[&Var], is_own: bool) -> Result<()> {
    assert_eq!(Pass::new(loss).is_some(), is_own);
    let (expected, got) = (loss.backward()?, backward(loss)?);
    for var in vars {
        let numbers =
            |store: &GradStore| store.get(var).map(|gradient| gradient.flatten_all()?.to_vec1::<f64>());
        assert_eq!(numbers(&got).transpose()?, numbers(&expected).transpose()?);
        assert!(got.get(var).is_none_or(Tensor::is_contiguous));
    }
    Ok(())
}

#[test]
fn gradients_equal_candles() -> Result<()> {
    let [a, b, c] = vars()?;
    // Used once, several times, and both arguments of one operation.
    let x = product(&add(&a, &b)?, &a)?;
    let y = add(&product(&x, &x)?, &product(&c, &x)?)?;
    check(&total(&y)?, &[&a, &b, &c], true)
}

#[test]
fn candle_goes_on_from_where_operations_are_its_own() -> Result<()> {
    let [a, b, table] = vars()?;
    let ids = Tensor::new(&[2u32, 0, 2], &Device::Cpu)?;
    let rows = table.embedding(&ids)?;
    let view = b.t()?.contiguous()?.reshape((3, 4))?;
    let x = product(&product(&rows, &a)?, &view)?;
    check(&total(&x)?, &[&a, &b, &table], true)?;
    // The same view twice.
    check(&total(&product(&view, &view)?)?, &[&b], true)?;
    // In the middle of the graph, with and without a path around it; two of candle's operations after one another.
    let middle = product(&a, &b)?;
    check(&total(&product(&middle.sqr()?, &a)?)?, &[&a, &b], true)?;
    check(&total(&add(&product(&middle.sqr()?, &a)?, &middle)?)?, &[&a, &b], true)?;
    let below = a.sqr()?;
    check(&total(&product(&below.sqr()?, &below.neg()?)?)?, &[&a], true)
}

#[test]
fn other_shapes_are_no_operations() -> Result<()> {
    let [a, b] = vars()?;
    let x = product(&a.reshape(12)?.reshape((4, 3))?, &b.reshape((4, 3))?)?;
    let y = product(&x.flatten_all()?, &x.unsqueeze(1)?.reshape(12)?)?;
    let z = product(&y.reshape((2, 6))?, &a.reshape((2, 6))?)?;
    let loss = total(&z)?;
    check(&loss, &[&a, &b], true)?;
    let pass = Pass::new(&loss).expect("an own way");
    assert!(pass.parts.is_empty());
    // A view of a part of the memory, and a copy, are candle's operations.
    check(&total(&x.narrow(0, 1, 2)?)?, &[&a, &b], true)?;
    let pass = total(&x.t()?.contiguous()?)?;
    assert_eq!(Pass::new(&pass).expect("an own way").parts.len(), 1);
    Ok(())
}

#[test]
fn candle_goes_through_all_after_its_own_operation() -> Result<()> {
    let [a, b] = vars()?;
    check(&(total(&product(&a, &b)?)? * 2.0)?, &[&a, &b], false)
}

/// Each operation's backward runs once, with the whole gradient, since it may count its calls.
#[test]
fn each_operation_is_met_once() -> Result<()> {
    struct Counted(Arc<AtomicUsize>);
    impl CustomOp1 for Counted {
        fn name(&self) -> &'static str {
            "counted"
        }

        fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
            Ok((CpuStorage::F64(numbers(x, layout)?), layout.shape().clone()))
        }

        fn bwd(&self, _: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
            self.0.fetch_add(1, Ordering::Relaxed);
            Ok(Some(gradient.clone()))
        }
    }
    let [a, b] = vars()?;
    let count = Arc::<AtomicUsize>::default();
    let hooked = apply_op1(&a, Counted(count.clone()))?;
    // Known operations before and after candle's.
    let x = add(&product(&hooked, &b)?.sqr()?, &product(&hooked.neg()?, &hooked)?)?;
    let loss = total(&product(&x, &hooked)?)?;
    check(&loss, &[&a, &b], true)?;
    // Once in candle's backward, once in this crate's.
    assert_eq!(count.load(Ordering::Relaxed), 2);
    Ok(())
}

#[test]
fn each_gradient_has_memory_of_its_own() -> Result<()> {
    let [a, b] = vars()?;
    let grads = backward(&total(&add(&a, &b)?)?)?;
    let [of_a, of_b] = [&a, &b].map(|var| grads.get(var).expect("a gradient"));
    assert!(!share_storage(of_a, of_b));
    let seed = Tensor::ones((3, 4), DType::F64, &Device::Cpu)?;
    let grads = backward(&scalar_with_gradient(&a, seed.clone())?)?;
    assert!(!share_storage(grads.get(&a).expect("a gradient"), &seed));
    Ok(())
}

#[test]
fn the_table_keeps_nothing() -> Result<()> {
    let [a, b] = vars()?;
    let x = product(&a, &b)?;
    let y = product(&x, &b)?;
    assert!(is_known(x.id()) && is_known(y.id()));
    let (of_x, of_y) = (x.detach(), y.clone());
    drop((x, y));
    assert!(is_known(of_y.id()));
    assert!(!is_known(of_x.id()), "a detached tensor is another");
    let id = of_y.id();
    drop(of_y);
    assert!(!is_known(id));
    Ok(())
}

#[test]
fn gradients_that_do_not_fit_are_refused() -> Result<()> {
    struct Wrong;
    impl CustomOp1 for Wrong {
        fn name(&self) -> &'static str {
            "wrong"
        }

        fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
            Ok((CpuStorage::F64(numbers(x, layout)?), layout.shape().clone()))
        }

        fn bwd(&self, _: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
            gradient.narrow(0, 0, 1).map(Some)
        }
    }
    let [a] = vars()?;
    let error = backward(&total(&apply_op1(&a, Wrong)?)?).unwrap_err().to_string();
    assert!(error.contains("a gradient is F64 of [1, 4], its tensor F64 of [3, 4]"), "{error}");
    Ok(())
}

/// Ranks exchange gradients in the order in which backward reaches parameters, whichever operations lie between.
#[test]
fn operations_are_met_in_candles_order() -> Result<()> {
    struct Noted(&'static str, Arc<Mutex<Vec<&'static str>>>);
    impl CustomOp1 for Noted {
        fn name(&self) -> &'static str {
            self.0
        }

        fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
            Ok((CpuStorage::F64(numbers(x, layout)?), layout.shape().clone()))
        }

        fn bwd(&self, _: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
            self.1.lock().expect("the list").push(self.0);
            Ok(Some(gradient.clone()))
        }
    }
    let vars: [Var; 4] = vars()?;
    let order = Arc::<Mutex<Vec<_>>>::default();
    let noted = |var: &Var, name| apply_op1(var, Noted(name, order.clone()));
    let [below, beside, above, last] = [
        noted(&vars[0], "below")?,
        noted(&vars[1], "beside")?,
        noted(&vars[2], "above")?,
        noted(&vars[3], "last")?,
    ];
    for middle in [product(&below, &beside)?, product(&below, &beside)?.sqr()?] {
        let loss = total(&product(&product(&middle, &above)?, &last)?)?;
        loss.backward()?;
        let expected = std::mem::take(&mut *order.lock().expect("the list"));
        backward(&loss)?;
        assert_eq!(std::mem::take(&mut *order.lock().expect("the list")), expected);
        assert_eq!(expected.len(), 4);
    }
    Ok(())
}
