//! Ranges read of any parameter equal those of the whole, for all file layouts.

use std::ops::Range;

use crate::common::{FOLDERS, folder};
use candle_core::{DType, Device, Shape, Tensor};
use candle_nn::{Init, VarMap};
use models::{CausalLm, FolderConfig, Weights, save_folder};
use training::build::Builder;
use training::internal::Runs;
use training::named_vars;

/// Ranges that ranks read: shards, parts of divided layers, shards of these, and the first elements together with a
/// shard.
fn asked(dims: &[usize]) -> Vec<Vec<Range<usize>>> {
    let (len, width) = (dims.iter().product::<usize>(), dims.last().copied().unwrap_or(1));
    let (rows, half) = (len / width, len.div_ceil(2));
    let of_groups = Runs { start: len / 6, len: len / 6, stride: len / 3, count: 3 };
    let of_columns = Runs { start: width / 2, len: width / 2, stride: width, count: rows };
    let held = of_columns.len * of_columns.count;
    vec![
        vec![0..len],
        vec![0..half],
        vec![0..len.min(64), half..len],
        vec![len / 3 + 1..len / 2 + 3],
        vec![len - 1..len, 0..1, 4..4],
        of_groups.ranges().collect(),
        of_columns.ranges().collect(),
        of_columns.within(held / 3..held - 1).collect(),
        vec![],
    ]
}

fn numbers(tensor: &Tensor) -> Vec<f64> {
    tensor.flatten_all().unwrap().to_dtype(DType::F64).unwrap().to_vec1().unwrap()
}

fn compare(weights: &Weights, dtype: DType, what: &str) {
    let (whole, parts) = (weights.tensors(dtype, &Device::Cpu), weights.parts());
    for (name, dims) in weights.shapes() {
        let all = numbers(&whole.get(dims.as_slice(), name).unwrap());
        for ranges in asked(dims) {
            let shape = Shape::from(dims.as_slice());
            let read = parts.read(name, &shape, Init::Const(0.0), dtype, &ranges).unwrap();
            let expected: Vec<f64> = ranges.iter().flat_map(|range| &all[range.clone()]).copied().collect();
            assert_eq!(read.dtype(), dtype);
            assert!(numbers(&read) == expected, "{what}, {name} {dims:?}: {ranges:?}");
        }
    }
}

#[test]
fn parts_are_those_of_the_whole() {
    for name in FOLDERS {
        let weights = Weights::folder(&folder(name)).unwrap();
        for dtype in [DType::F32, DType::BF16, DType::F64] {
            compare(&weights, dtype, name);
        }
        compare(&Weights::random(weights.config(), 3).unwrap(), DType::F32, name);
        // The same from files in half precision.
        let (vars, out) = (VarMap::new(), tempfile::tempdir().unwrap());
        CausalLm::new(weights.config(), &Builder::new(weights.vars(&vars, DType::F32, &Device::Cpu)))
            .unwrap();
        for dtype in [DType::F16, DType::BF16] {
            let how = FolderConfig { dtype: Some(dtype), ..FolderConfig::default() };
            save_folder(out.path(), weights.config(), &named_vars(&vars), &how).unwrap();
            compare(&Weights::folder(out.path()).unwrap(), DType::F32, name);
        }
    }
}

#[test]
fn another_shape_is_refused() {
    let weights = Weights::folder(&folder("gpt2")).unwrap();
    let (name, dims) = weights.shapes().iter().find(|(name, _)| name.ends_with("c_attn.weight")).unwrap();
    let turned = Shape::from((dims[1], dims[0]));
    let line = weights
        .parts()
        .read(name, &turned, Init::Const(0.0), DType::F32, &[0..1, 2..3])
        .unwrap_err()
        .to_string();
    assert!(line.contains("is asked for as") && line.contains(name.as_str()), "{line}");
}
