//! Weights in 4 and 8 bits against bitsandbytes, their products against those of the widened weights, and invalid input.

use candle_core::{DType, Device, Module, Result, Tensor, Var};
use ops::nf4::{BLOCK, BLOCK_BYTES, Nf4Matrix};
use ops::quantized::{Format, Int8Matrix, QuantizedLinear, QuantizedMatrix};
use ops::{Linear, backward};
use serde_json::Value;
use sha2::{Digest, Sha256};

/// The weight that the fixture's script draws for a shape.
fn weight(number: u32, rows: usize, columns: usize) -> Result<Tensor> {
    let mut state = number + 1;
    let next = |_| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let x = (state >> 8) as f32 * 0.5f32.powi(23) - 1.0;
        x * x * x
    };
    let mut numbers: Vec<f32> = (0..rows * columns).map(next).collect();
    if number % 5 == 4 {
        numbers[..BLOCK].fill(0.0);
    }
    Tensor::from_vec(numbers, (rows, columns), &Device::Cpu)
}

fn digest(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

fn random(dims: &[usize]) -> Result<Tensor> {
    Tensor::randn(0f32, 1.0, dims, &Device::Cpu)
}

#[test]
fn codes_and_scales_are_bitsandbytes() -> Result<()> {
    let fixture: Value = serde_json::from_str(include_str!("../fixtures/nf4.json")).unwrap();
    let shapes = fixture["shapes"].as_array().unwrap();
    assert_eq!(shapes.len(), 20);
    for (number, shape) in (0..).zip(shapes) {
        let [rows, columns] = ["rows", "columns"].map(|side| shape[side].as_u64().unwrap() as usize);
        let dtype = if shape["dtype"] == "bfloat16" { DType::BF16 } else { DType::F32 };
        let quantized = Nf4Matrix::quantize(&weight(number, rows, columns)?.to_dtype(dtype)?)?;
        let bits = shape["scales"].as_array().unwrap().iter().map(|bits| bits.as_u64().unwrap() as u32);
        let scales: Vec<u8> = bits.flat_map(u32::to_le_bytes).collect();
        assert_eq!(quantized.scales(), scales, "{shape}");
        assert_eq!(digest(&quantized.scale_codes()), shape["scale_codes"], "{shape}");
        assert_eq!(digest(&quantized.codes()), shape["codes"], "{shape}");
        let wide = quantized.widen()?.flatten_all()?.to_vec1::<f32>()?;
        let wide: Vec<u8> = wide.into_iter().flat_map(f32::to_le_bytes).collect();
        assert_eq!(digest(&wide), shape["wide"], "{shape}");
    }
    Ok(())
}

#[test]
fn codes_in_8_bits_are_bitsandbytes() -> Result<()> {
    let fixture: Value = serde_json::from_str(include_str!("../fixtures/int8.json")).unwrap();
    for (number, shape) in (0..).zip(fixture["shapes"].as_array().unwrap()) {
        let [rows, columns] = ["rows", "columns"].map(|side| shape[side].as_u64().unwrap() as usize);
        let dtype = if shape["dtype"] == "bfloat16" { DType::BF16 } else { DType::F32 };
        let quantized = Int8Matrix::quantize(&weight(number, rows, columns)?.to_dtype(dtype)?)?;
        assert_eq!(digest(quantized.codes()), shape["codes"], "{shape}");
        let scales: Vec<u8> = quantized.scales().iter().flat_map(|scale| scale.to_le_bytes()).collect();
        assert_eq!(digest(&scales), shape["scales"], "{shape}");
        let wide = quantized.widen()?.flatten_all()?.to_vec1::<f32>()?;
        let wide: Vec<u8> = wide.into_iter().flat_map(f32::to_le_bytes).collect();
        assert_eq!(digest(&wide), shape["wide"], "{shape}");
    }
    Ok(())
}

/// A part of the rows, or of the columns, in 8 bits is the same part of the widened weight, to the bit.
#[test]
fn parts_in_8_bits_are_those_of_the_whole() -> Result<()> {
    let (inputs, outputs) = (75, 40);
    let quantized = QuantizedMatrix::quantize(Format::Int8, &random(&[outputs, inputs])?)?;
    let wide = quantized.widen()?;
    let codes = Tensor::from_slice(quantized.blocks(), (outputs, inputs), &Device::Cpu)?;
    let scales = Tensor::new(quantized.scales(), &Device::Cpu)?;
    let widened = |codes: Tensor, rows: std::ops::Range<usize>| {
        let columns = codes.dim(1)?;
        let layer = QuantizedLinear::new(Format::Int8, codes.contiguous()?, &scales, rows.collect())?;
        layer.forward(&Tensor::eye(columns, DType::F32, &Device::Cpu)?)?.t()
    };
    let rows = widened(codes.narrow(0, 7, 20)?, 7..27)?;
    assert_eq!(rows.to_vec2::<f32>()?, wide.narrow(0, 7, 20)?.to_vec2::<f32>()?);
    let columns = widened(codes.narrow(1, 13, 31)?, 0..outputs)?;
    assert_eq!(columns.to_vec2::<f32>()?, wide.narrow(1, 13, 31)?.to_vec2::<f32>()?);
    let beyond = QuantizedLinear::new(Format::Int8, codes, &scales, (1..41).collect());
    assert!(beyond.unwrap_err().to_string().contains("no part of the matrix"));
    let line = Int8Matrix::quantize(&(random(&[2, 3])? * 1e6)?).unwrap_err().to_string();
    assert!(line.contains("not finite in f16"), "{line}");
    Ok(())
}

/// Products and gradients are those of the widened weight, also where several tiles make them.
#[test]
fn products_are_those_of_the_widened_weight() -> Result<()> {
    for (rows, inputs, outputs) in
        [(&[3][..], 64, 5), (&[2, 7], 192, 130), (&[1], 320, 16), (&[5], 2112, 2050)]
    {
        let weight = random(&[outputs, inputs])?;
        let types = [(DType::F64, 1e-10), (DType::F32, 1e-4), (DType::BF16, 0.5), (DType::F16, 0.05)];
        let all = [Format::Nf4, Format::Int8].into_iter().flat_map(|format| types.map(|of| (format, of)));
        for (format, (dtype, most)) in all {
            let quantized = QuantizedMatrix::quantize(format, &weight)?;
            let x = Var::from_tensor(&random(&[rows, &[inputs]].concat())?.to_dtype(dtype)?)?;
            let wide = Linear::new(quantized.widen()?.to_dtype(dtype)?, None);
            let layer = QuantizedLinear::whole(&quantized)?;
            let found = |layer: &dyn Module| {
                let y = layer.forward(&x)?;
                let gradient = backward(&y.sqr()?.sum_all()?)?.get(&x).cloned().expect("a gradient");
                Result::Ok([y.to_dtype(DType::F64)?, gradient.to_dtype(DType::F64)?])
            };
            for (ours, expected) in found(&layer)?.iter().zip(&found(&wide)?) {
                assert_eq!(ours.dims(), expected.dims());
                let largest = expected.abs()?.max_all()?.to_scalar::<f64>()?;
                let gap = (ours - expected)?.abs()?.max_all()?.to_scalar::<f64>()?;
                assert!(
                    gap <= most * largest.max(1.0) / 50.0,
                    "{rows:?} {inputs} {outputs} {dtype:?}: {gap}"
                );
            }
        }
    }
    Ok(())
}

/// A part of the rows, or of the blocks of all rows, is the same part of the widened weight, to the bit.
#[test]
fn parts_are_those_of_the_whole() -> Result<()> {
    let (inputs, outputs) = (640, 90);
    let quantized = Nf4Matrix::quantize(&random(&[outputs, inputs])?)?;
    let wide = quantized.widen()?;
    let per_row = inputs / BLOCK;
    let blocks = Tensor::from_slice(quantized.blocks(), (outputs, per_row * BLOCK_BYTES), &Device::Cpu)?;
    let scales = Tensor::new(quantized.scales(), &Device::Cpu)?;
    let widened = |blocks: Tensor, rows: Vec<usize>| {
        let columns = blocks.dim(1)? / BLOCK_BYTES * BLOCK;
        let layer = QuantizedLinear::new(Format::Nf4, blocks.contiguous()?, &scales, rows.into())?;
        layer.forward(&Tensor::eye(columns, DType::F32, &Device::Cpu)?)?.t()
    };
    let rows = widened(blocks.narrow(0, 37, 20)?, (37..57).map(|row| row * per_row).collect())?;
    assert_eq!(rows.to_vec2::<f32>()?, wide.narrow(0, 37, 20)?.to_vec2::<f32>()?);
    let part = blocks.narrow(1, 3 * BLOCK_BYTES, 4 * BLOCK_BYTES)?;
    let columns = widened(part, (0..outputs).map(|row| row * per_row + 3).collect())?;
    assert_eq!(columns.to_vec2::<f32>()?, wide.narrow(1, 3 * BLOCK, 4 * BLOCK)?.to_vec2::<f32>()?);
    Ok(())
}

#[test]
fn what_has_no_4_bits_is_refused() -> Result<()> {
    let line = |weight: Tensor| Nf4Matrix::quantize(&weight).unwrap_err().to_string();
    assert!(line(random(&[2, 96])?).contains("96 inputs"));
    assert!(line((random(&[2, 64])? * f64::INFINITY)?).contains("not finite"));
    let layer = QuantizedLinear::whole(&QuantizedMatrix::quantize(Format::Nf4, &random(&[2, 64])?)?)?;
    let unfit = layer.forward(&random(&[3, 65])?).unwrap_err().to_string();
    assert_eq!(unfit, "linear in few bits: input must be of shape [3, 64], got [3, 65]");
    Ok(())
}
