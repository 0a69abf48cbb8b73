//! Tests of products against their definition.

use candle_core::{DType, Device, Tensor};

use super::few_rows::{FEW, few_rows};
use super::narrow_product::{product_of_narrow, product_of_widened};
use super::*;

/// Small and large products, dense, strided and transposed, written and added, equal the definition.
#[test]
fn products_are_sums_of_products() -> candle_core::Result<()> {
    for (m, n, k) in [(1, 1, 1), (3, 5, 2), (16, 16, 16), (17, 33, 19), (64, 130, 48), (2, 3, 0)] {
        for (by_columns, pad, add) in [(false, 0, false), (true, 0, true), (false, 3, true), (true, 5, false)]
        {
            let number = |i: usize| ((i * 7919) % 31) as f64 - 15.0;
            let numbers: Vec<f64> = (0..(m + n + k + pad) * (m + n + k + pad)).map(number).collect();
            let a = Matrix::new(&numbers, m, k, k + pad);
            let b = match by_columns {
                true => Matrix::new(&numbers[1..], n, k, k + pad).t(),
                false => Matrix::new(&numbers[1..], k, n, n + pad),
            };
            let mut out = vec![1.0; m * n];
            multiply(&mut out, (a, b), 0.5, add, ProductConfig::default())?;
            for (index, &found) in out.iter().enumerate() {
                let (i, j) = (index / n, index % n);
                let other = |l: usize| if by_columns { 1 + j * (k + pad) + l } else { 1 + l * (n + pad) + j };
                let sum: f64 = (0..k).map(|l| numbers[i * (k + pad) + l] * numbers[other(l)]).sum();
                assert_eq!(found, 0.5 * sum + f64::from(u8::from(add)), "{m} {n} {k} {by_columns} {pad}");
            }
        }
    }
    Ok(())
}

/// Products of few rows are computed transposed; the bits are those of the other way.
#[test]
fn products_of_few_rows_have_the_same_bits() {
    fn check<T: Accumulator>(number: impl Fn(usize) -> T, scale: T) {
        for (m, n, k) in
            [(2, 33, 65), (3, 70, 90), (17, 130, 515), (32, 301, 40), (33, 64, 530), (128, 20, 2049)]
        {
            for (pad, in_parallel) in [(0, false), (3, true)] {
                let numbers: Vec<T> = (0..(m + n) * (k + pad)).map(&number).collect();
                let a = Matrix::new(&numbers, m, k, k + pad);
                let b = Matrix::new(&numbers[m * (k + pad)..], n, k, k + pad).t();
                assert!(transposed::is_faster(&a, &b), "{m} {n} {k}");
                let (mut one, mut other) = (vec![T::one(); m * n], Vec::with_capacity(m * n));
                let how = ProductConfig { in_parallel, ..ProductConfig::default() };
                multiply(&mut one, (a, b), scale, false, how).unwrap();
                // SAFETY: the matrices fit each other, their slices and the capacity.
                unsafe {
                    call_gemm(other.spare_capacity_mut(), [n, 1], (a, b), scale, false, in_parallel);
                    other.set_len(m * n);
                }
                assert!(one == other, "{m} {n} {k} {pad}");
            }
        }
    }
    let number = |i: usize| ((i * 7919) % 1009) as f64 / 1009.0 - 0.5;
    check(number, 0.3);
    check(|i| number(i) as f32, 0.3);
}

/// bf16 products by every available unit, and without one, equal the definition, for all shapes, orders and edges.
#[test]
fn products_of_rounded_numbers() -> candle_core::Result<()> {
    let shapes =
        [(1, 1, 1), (3, 5, 2), (32, 32, 32), (33, 47, 31), (64, 130, 515), (17, 1030, 64), (1, 40, 700)];
    for (m, n, k) in shapes {
        for (by_columns, pad, add, scale) in
            [(false, 0, false, 1.0), (true, 0, true, 0.5), (false, 3, true, 2.0), (true, 5, false, 1.0)]
        {
            let number = |i: usize| ((i * 7919) % 1009) as f32 / 1009.0 - 0.5;
            let numbers: Vec<f32> = (0..(m + n + pad) * (k + pad) + k * n + 9).map(number).collect();
            let a = match add {
                true => Matrix::new(&numbers, k, m, m + pad).t(),
                false => Matrix::new(&numbers, m, k, k + pad),
            };
            let b = match by_columns {
                true => Matrix::new(&numbers[1..], n, k, k + pad).t(),
                false => Matrix::new(&numbers[1..], k, n, n + pad),
            };
            all_ways(Rounded { a, b, add, scale })?;
        }
    }
    Ok(())
}

/// A product that is written, or added to ones.
#[derive(Debug, Clone, Copy)]
struct Rounded<'a> {
    a: Matrix<'a, f32>,
    b: Matrix<'a, f32>,
    add: bool,
    scale: f32,
}

impl Rounded<'_> {
    /// Asserts that `out` is the product of all elements rounded by `digits`.
    fn check(&self, out: &[f32], digits: fn(f32) -> f32, most: f32, what: &str) {
        let Self { a, b, add, scale } = self;
        let at = |x: &Matrix<'_, f32>, i: usize, j: usize| {
            f64::from(digits(x.data[i * x.row_stride + j * x.column_stride]))
        };
        for (index, found) in out.iter().enumerate() {
            let (i, j) = (index / b.columns, index % b.columns);
            let sum: f64 = (0..a.columns).map(|l| at(a, i, l) * at(b, l, j)).sum();
            let expected = sum as f32 * scale + f32::from(u8::from(*add));
            let gap = (found - expected).abs() / (a.columns as f32).sqrt();
            let (m, n, k) = (a.rows, b.columns, a.columns);
            assert!(gap < most, "{what}, {m} x {n} x {k}, {self:?} at {index}: {found}, {expected}");
        }
    }
}

fn all_ways(product: Rounded<'_>) -> candle_core::Result<()> {
    let Rounded { a, b, add, scale } = product;
    let round: fn(f32) -> f32 = |x| half::bf16::from_f32(x).to_f32();
    let ones = || vec![1f32; a.rows * b.columns];
    let mut out = ones();
    multiply(&mut out, (a, b), scale, add, ProductConfig { precision: Precision::Bf16, in_parallel: false })?;
    product.check(&out, round, 3e-6, "this machine's way");
    let (mut left, mut right, mut out) = (Vec::new(), Vec::new(), ones());
    let rounded = (a.rounded_into(scale, &mut left), b.rounded_into(1.0, &mut right));
    multiply_exactly(&mut out, rounded, 1.0, add, false);
    product.check(&out, round, 3e-6, "without a unit");
    #[cfg(target_arch = "x86_64")]
    for unit in bf16::available() {
        for (digits, rounding, most) in [
            (bf16::OperandBits::Eight, round, 3e-6),
            (bf16::OperandBits::Sixteen, (|x| x) as fn(f32) -> f32, 1e-5),
        ] {
            let run = |in_parallel| {
                let mut out = ones();
                // SAFETY: the matrices fit, and `out` is initialized.
                unsafe {
                    let out = &mut *(std::ptr::from_mut(&mut out[..]) as *mut [MaybeUninit<f32>]);
                    bf16::Bf16Product { unit, digits, in_parallel }.multiply(out, (a, b), scale, add);
                }
                out
            };
            product.check(&run(false), rounding, most, "a unit");
            assert_eq!(run(false), run(true), "by several threads");
        }
    }
    Ok(())
}

#[test]
fn what_does_not_fit_is_refused() {
    let numbers = [0f32; 12];
    let whole = Matrix::new(&numbers, 3, 4, 4);
    let line = |out: usize, a, b| {
        multiply(&mut vec![0f32; out], (a, b), 1.0, false, ProductConfig::default()).is_err()
    };
    assert!(!line(9, whole, whole.t()));
    assert!(line(8, whole, whole.t()));
    assert!(line(12, whole, whole));
    assert!(line(9, whole.rows(1..4), whole.t()));
    assert!(line(9, Matrix::new(&numbers, 3, 4, 5), whole.t()));
    assert!(line(9, Matrix::new(&numbers, 3, 4, usize::MAX), whole.t()));
    assert!(line(9, Matrix::new(&numbers, 3, 4, 0), whole.t()));
}

/// A product may be written to memory with any content.
#[test]
#[allow(unsafe_code)]
fn what_lay_there_before_has_no_part_in_a_product() {
    for (m, n, k) in
        [(1, 1, 1), (1, 9, 5), (9, 1, 5), (7, 5, 1), (33, 65, 2), (64, 48, 700), (130, 257, 1300)]
    {
        let number = |at: usize| (at % 17) as f32 - 8.0;
        let a: Vec<f32> = (0..m * k).map(number).collect();
        let b: Vec<f32> = (0..k * n).map(|at| number(at + 5)).collect();
        for (b, expected) in [(Matrix::new(&b, k, n, n), None), (Matrix::new(&b, n, k, k).t(), Some(()))] {
            let mut out = vec![MaybeUninit::new(f32::NAN); m * n];
            // SAFETY: the sizes fit.
            unsafe { by_gemm(&mut out, (Matrix::new(&a, m, k, k), b), 1.0, false, false) };
            for (at, got) in out.into_iter().enumerate() {
                let (row, column) = (at / n, at % n);
                let right = |i: usize| match expected {
                    None => b.data[i * n + column],
                    Some(()) => b.data[column * k + i],
                };
                let sum: f32 = (0..k).map(|i| a[row * k + i] * right(i)).sum();
                // SAFETY: it was initialized, at first with NaN.
                assert_eq!(unsafe { got.assume_init() }, sum, "{m} {n} {k} at {at}");
            }
        }
    }
}

#[test]
fn numbers_are_rounded_as_to_bf16() {
    let special = [0.0, -0.0, 1.0, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, f32::MIN_POSITIVE, 1e-40];
    let numbers = (0..1 << 18).map(|at: u32| f32::from_bits(at.wrapping_mul(2_654_435_761)));
    for x in special.into_iter().chain(numbers) {
        let expected = half::bf16::from_f32(x).to_f32();
        assert!(rounded(x).to_bits() == expected.to_bits() || (x.is_nan() && rounded(x).is_nan()), "{x:e}");
    }
}

/// Also of transposed views, of one row, and of nothing.
#[test]
fn products_of_tensors_in_f32_are_candles_to_the_bit() -> candle_core::Result<()> {
    let random = |dims: (usize, usize)| Tensor::randn(0f32, 1., dims, &Device::Cpu);
    for (m, k, n) in [(64, 33, 47), (1, 70, 5), (3, 1, 2), (200, 64, 129), (0, 3, 4), (3, 0, 4)] {
        let (a, b) = (random((m, k))?, random((k, n))?);
        for (a, b) in [(&a, &b), (&random((k, m))?.t()?, &random((n, k))?.t()?)] {
            let (ours, candles) = (Precision::F32.matmul(a, b)?, a.matmul(b)?);
            let bits = |x: &Tensor| x.flatten_all()?.to_vec1::<f32>();
            assert_eq!((ours.dims(), bits(&ours)?), (candles.dims(), bits(&candles)?), "{m} {k} {n}");
        }
    }
    assert!(Precision::F32.matmul(&random((2, 3))?, &random((2, 3))?).is_err());
    Ok(())
}

/// Matrices of 16 bits, in every order and of a few or many rows, are multiplied with all their digits, and their sums are
/// rounded once.
#[test]
fn products_of_sixteen_bits() -> candle_core::Result<()> {
    let shapes = [(1, 1, 1), (1, 40, 700), (4, 130, 1025), (5, 33, 31), (64, 130, 515), (0, 3, 4), (3, 2, 0)];
    for dtype in [DType::BF16, DType::F16] {
        let digits = if dtype == DType::BF16 { 8 } else { 11 };
        for (m, n, k) in shapes {
            let random = |dims: (usize, usize)| Tensor::randn(0f32, 1., dims, &Device::Cpu)?.to_dtype(dtype);
            let plain = (random((m, k))?, random((k, n))?);
            // Views of more rows or columns, too.
            let views =
                (random((k, m + 2))?.narrow(1, 1, m)?.t()?, random((n + 3, k))?.narrow(0, 2, n)?.t()?);
            let scattered =
                (random((m, 2 * k))?.reshape((m, k, 2))?.narrow(2, 0, 1)?.squeeze(2)?, random((k, n))?);
            for (a, b) in [plain, views, scattered] {
                let found = Precision::F32.matmul(&a, &b)?;
                assert_eq!((found.dtype(), found.dims()), (dtype, &[m, n][..]));
                let wide = |x: &Tensor| x.to_dtype(DType::F64)?.contiguous();
                let exact = wide(&a)?.matmul(&wide(&b)?)?;
                let most = (exact.abs()? * 0.5f64.powi(digits))? + 2e-5 * (k as f64).sqrt();
                let gaps = ((wide(&found)? - &exact)?.abs()? - most?)?.flatten_all()?.to_vec1::<f64>()?;
                assert!(gaps.iter().all(|gap| *gap <= 0.0), "{dtype:?} {m} x {k} x {n}");
            }
        }
    }
    Ok(())
}

/// Every way gives the same within the rounding of sums in f32, whatever the number of threads.
#[test]
fn products_of_sixteen_bits_in_every_way() -> candle_core::Result<()> {
    fn check<T: Narrow>(number: impl Fn(f64) -> T) -> candle_core::Result<()> {
        for (m, n, k) in [(1, 300, 600), (3, 70, 33), (70, 45, 600)] {
            let numbers: Vec<T> =
                (0..(m + n) * k).map(|i| number(((i * 7919) % 1009) as f64 / 1009.0 - 0.5)).collect();
            let (a, b) = (Matrix::new(&numbers, m, k, k), Matrix::new(&numbers[m * k..], n, k, k).t());
            let terms = |i: usize, j: usize| {
                let (row, column) = (&numbers[i * k..][..k], &numbers[(m + j) * k..][..k]);
                row.iter().zip(column).map(|(x, y)| x.to_f64() * y.to_f64()).collect::<Vec<_>>()
            };
            let mut ways = vec![product_of_widened((a, b), false)?, product_of_narrow((a, b), false)?];
            assert_eq!(ways[1], product_of_narrow((a, b), true)?);
            if m <= FEW {
                ways.push(few_rows(a, b.t()));
            }
            for (way, found) in ways.iter().enumerate() {
                for (at, x) in found.iter().enumerate() {
                    let terms = terms(at / n, at % n);
                    let gap = (f64::from(*x) - terms.iter().sum::<f64>()).abs();
                    let most = 5e-6 * terms.iter().map(|term| term.abs()).sum::<f64>();
                    assert!(gap <= most, "{way}, {m} x {n} x {k} at {at}: {gap}, {most}");
                }
            }
        }
        Ok(())
    }
    check(half::bf16::from_f64)?;
    check(half::f16::from_f64)
}

#[test]
fn operands_of_sixteen_bits_that_do_not_fit_are_refused() {
    let numbers = [half::bf16::ONE; 12];
    let whole = Matrix::new(&numbers, 3, 4, 4);
    assert!(product_of_narrow((whole, whole.t()), false).is_ok());
    assert!(product_of_narrow((whole, whole), false).is_err());
    assert!(product_of_narrow((whole.rows(1..4), whole.t()), false).is_err());
    let scattered = Matrix { column_stride: 2, columns: 2, ..whole };
    assert!(product_of_narrow((scattered, whole.columns(0..2).t()), false).is_err());
}

/// All numbers of 16 bits, and many of 32.
#[test]
fn numbers_become_wider_and_narrower_as_those_of_half() {
    fn check<T: Narrow>(all: Vec<T>, wide: fn(&T) -> f32, narrow: fn(f32) -> T, bits: fn(&T) -> u16) {
        let mut found = vec![0.0; all.len()];
        T::widen_into(&all, &mut found);
        for (x, found) in all.iter().zip(&found) {
            assert!(
                found.to_bits() == wide(x).to_bits() || (found.is_nan() && wide(x).is_nan()),
                "{}",
                wide(x)
            );
        }
        let numbers = (0..1 << 20).map(|at: u32| f32::from_bits(at.wrapping_mul(2_654_435_761)));
        let numbers: Vec<f32> = numbers.chain(found).collect();
        let mut found = vec![T::zero(); numbers.len()];
        T::narrow_into(&numbers, &mut found);
        for (x, found) in numbers.iter().zip(&found) {
            assert_eq!(bits(found), bits(&narrow(*x)), "{x:e}");
        }
    }
    let all = 0..=u16::MAX;
    use half::{bf16, f16};
    check(all.clone().map(bf16::from_bits).collect(), |x| x.to_f32(), bf16::from_f32, |x| x.to_bits());
    check(all.map(f16::from_bits).collect(), |x| x.to_f32(), f16::from_f32, |x| x.to_bits());
}
