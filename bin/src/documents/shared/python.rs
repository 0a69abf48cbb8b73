//! Formatting of numbers and tensors as in Python and PyTorch.

use std::fmt::{self, Display, Formatter};

/// A float, printed as Python's `str(x)` does. For an f32, pass it as f64: that is what `loss.item()` returns.
///
/// ```
/// use bin::documents::shared::python::Float;
///
/// assert_eq!(Float(4.67319917678833).to_string(), "4.67319917678833");
/// assert_eq!(Float(f64::from(4.6f32)).to_string(), "4.599999904632568");
/// assert_eq!(Float(1e-5).to_string(), "1e-05");
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Float(pub f64);

impl Display for Float {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let number = self.0;
        if number.is_nan() {
            return f.write_str("nan");
        }
        if number.is_infinite() {
            return f.write_str(if number > 0.0 { "inf" } else { "-inf" });
        }
        // Both languages print the fewest digits that read back as the same number.
        let scientific = format!("{number:e}");
        let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
        match exponent.parse::<i32>().unwrap_or(0) {
            -4..16 if number.fract() == 0.0 => write!(f, "{number:.1}"),
            -4..16 => write!(f, "{number}"),
            exponent @ ..0 => write!(f, "{digits}e-{:02}", -exponent),
            exponent => write!(f, "{digits}e+{exponent:02}"),
        }
    }
}

/// A float with `DIGITS` digits after the point, like Python's `{x:.4f}`.
///
/// ```
/// use bin::documents::shared::python::Fixed;
///
/// assert_eq!(Fixed::<4>(0.69314718).to_string(), "0.6931");
/// assert_eq!(Fixed::<4>(f64::NAN).to_string(), "nan");
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Fixed<const DIGITS: usize>(pub f64);

impl<const DIGITS: usize> Display for Fixed<DIGITS> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self.0.is_finite() {
            true => write!(f, "{:.DIGITS$}", self.0),
            false => Float(self.0).fmt(f),
        }
    }
}

/// Integers, printed as PyTorch prints a one-dimensional tensor.
///
/// ```
/// use bin::documents::shared::python::IntTensor;
///
/// assert_eq!(IntTensor(&[0, 10, 2]).to_string(), "tensor([ 0, 10,  2])");
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct IntTensor<'a>(pub &'a [u32]);

/// PyTorch's defaults: line width, the length above which only the ends are printed, and how many elements at each end.
const LINE: usize = 80;
const MOST: usize = 1000;
const EDGE: usize = 3;

impl Display for IntTensor<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        const BEGIN: &str = "tensor([";
        let numbers = self.0;
        let cut = numbers.len() > MOST;
        let (head, tail) =
            if cut { (&numbers[..EDGE], &numbers[numbers.len() - EDGE..]) } else { (numbers, &[][..]) };
        let width = head.iter().chain(tail).map(|number| number.to_string().len()).max().unwrap_or(0);
        let pad = |number: &u32| format!("{number:>width$}");
        let dots = cut.then(|| " ...".to_string());
        let words: Vec<String> = head.iter().map(pad).chain(dots).chain(tail.iter().map(pad)).collect();
        // Each element takes two more columns, for comma and space.
        let per_line = ((LINE - (BEGIN.len() - 1)) / (width + 2)).max(1);
        let lines: Vec<String> = words.chunks(per_line).map(|line| line.join(", ")).collect();
        let indent = format!(",\n{:indent$}", "", indent = BEGIN.len());
        write!(f, "{BEGIN}{}])", lines.join(&indent))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_are_pythons() {
        for (number, text) in [
            (0.0, "0.0"),
            (-0.0, "-0.0"),
            (1.0, "1.0"),
            (-12.5, "-12.5"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.5e22, "1.5e+22"),
            (1e300, "1e+300"),
            (0.0001, "0.0001"),
            (0.00012345, "0.00012345"),
            (9.9e-5, "9.9e-05"),
            (1.25e-7, "1.25e-07"),
            (5e-324, "5e-324"),
            (f64::from(4.784_787_7f32), "4.784787654876709"),
            (f64::from(1e-10f32), "1.000000013351432e-10"),
            (f64::NAN, "nan"),
            (f64::INFINITY, "inf"),
            (f64::NEG_INFINITY, "-inf"),
        ] {
            assert_eq!(Float(number).to_string(), text);
        }
    }

    #[test]
    fn tensors_are_pytorchs() {
        assert_eq!(IntTensor(&[7; 10]).to_string(), "tensor([7, 7, 7, 7, 7, 7, 7, 7, 7, 7])");
        assert_eq!(IntTensor(&[]).to_string(), "tensor([])");
        let lines: Vec<usize> = IntTensor(&[11; 40]).to_string().lines().map(str::len).collect();
        assert_eq!(lines, [79, 79, 24]);
        let cut: Vec<u32> = (0..1001).collect();
        assert_eq!(IntTensor(&cut).to_string(), "tensor([   0,    1,    2,  ...,  998,  999, 1000])");
    }
}
