//! Numbers of weights that are NaN or infinite, or become so in another dtype.

use candle_core::{CpuStorage, DType, Result, Storage, Tensor};

/// Describes the first number of `converted`, a tensor on the CPU, that is not finite, if there is one: its place, and
/// what it is in `tensor`, from which it was converted.
pub(crate) fn first_not_finite(tensor: &Tensor, converted: &Tensor) -> Result<Option<(usize, f64)>> {
    let Some(place) = place(&converted.flatten_all()?)? else { return Ok(None) };
    let number = tensor.flatten_all()?.get(place)?.to_dtype(DType::F64)?.to_scalar()?;
    Ok(Some((place, number)))
}

/// Returns the number with the largest magnitude, or the first that is not finite, with its place; `None` of no numbers.
pub(crate) fn largest(tensor: &Tensor) -> Result<Option<(usize, f64)>> {
    let numbers = tensor.flatten_all()?.to_dtype(DType::F64)?.to_vec1::<f64>()?;
    let magnitude = |number: f64| if number.is_nan() { f64::INFINITY } else { number.abs() };
    let larger = |a: (usize, f64), b: (usize, f64)| if magnitude(b.1) > magnitude(a.1) { b } else { a };
    Ok(numbers.into_iter().enumerate().reduce(larger))
}

fn place(flat: &Tensor) -> Result<Option<usize>> {
    let flat = flat.contiguous()?;
    let (storage, layout) = flat.storage_and_layout();
    let own = layout.start_offset()..layout.start_offset() + flat.elem_count();
    Ok(match &*storage {
        Storage::Cpu(CpuStorage::F32(all)) => first(&all[own], |number| number.is_finite()),
        Storage::Cpu(CpuStorage::F64(all)) => first(&all[own], |number| number.is_finite()),
        Storage::Cpu(CpuStorage::F16(all)) => first(&all[own], |number| number.is_finite()),
        Storage::Cpu(CpuStorage::BF16(all)) => first(&all[own], |number| number.is_finite()),
        _ => None,
    })
}

/// Returns the place of the first number that is not finite. Whole blocks are looked at without a branch, which is as
/// fast as reading them.
fn first<T>(all: &[T], is_finite: impl Fn(&T) -> bool) -> Option<usize> {
    const BLOCK: usize = 1024;
    let are_finite = |block: &[T]| block.iter().fold(true, |so_far, number| so_far & is_finite(number));
    let begin = BLOCK * all.chunks(BLOCK).position(|block| !are_finite(block))?;
    all[begin..].iter().position(|number| !is_finite(number)).map(|place| begin + place)
}

/// Describes a number that is not finite, or not in a dtype, at a place of a tensor of these dimensions.
pub(crate) fn problem(name: &str, dims: &[usize], place: usize, number: f64, dtype: &str) -> String {
    let mut rest = place;
    let mut index: Vec<usize> = dims.iter().rev().map(|dim| (rest % dim, rest /= dim).0).collect();
    index.reverse();
    let at = format!("tensor {name} has {number} at {index:?}");
    match number.is_finite() {
        true => format!("{at}, which {dtype} cannot hold: take a wider type"),
        false => format!("{at}: the file is damaged, or the training that wrote it had diverged"),
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    #[test]
    fn the_first_number_that_is_not_finite_is_found() {
        for dtype in [DType::F64, DType::F32, DType::F16, DType::BF16] {
            let of = |odd: &[(usize, f64)]| {
                let mut all = vec![1.5f64; 3000];
                odd.iter().for_each(|(place, number)| all[*place] = *number);
                let tensor = Tensor::new(all, &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
                first_not_finite(&tensor, &tensor).unwrap()
            };
            assert_eq!(of(&[]), None);
            assert_eq!(of(&[(2999, f64::INFINITY)]), Some((2999, f64::INFINITY)));
            let (place, number) = of(&[(1024, f64::NAN), (2000, f64::NEG_INFINITY)]).unwrap();
            assert!(place == 1024 && number.is_nan());
        }
    }

    #[test]
    fn a_number_beyond_the_dtype_is_named() {
        let wide = Tensor::new(&[[1f32, -2.0, 3.0], [4.0, 70_000.0, 6.0]], &Device::Cpu).unwrap();
        let narrow = wide.to_dtype(DType::F16).unwrap();
        let (place, number) = first_not_finite(&wide, &narrow).unwrap().unwrap();
        let said = problem("a", wide.dims(), place, number, "f16");
        assert_eq!(said, "tensor a has 70000 at [1, 1], which f16 cannot hold: take a wider type");
        assert!(problem("a", &[2, 3], 5, f64::NAN, "f32").starts_with("tensor a has NaN at [1, 2]: "));
    }
}
