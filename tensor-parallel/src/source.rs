//! Sources of a builder's weights.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use candle_core::{DType, Shape, Tensor};
use candle_nn::{Init, VarBuilder, VarMap};
use training::TensorFile;
use training::build::RangeReader;

use crate::division::Division;
use crate::{Error, Result};

/// Source of a builder's weights.
pub(crate) enum WeightSource {
    /// Draws weights; the map holds one whole weight at a time.
    Random {
        builder: VarBuilder<'static>,
        scratch: VarMap,
    },
    /// The second: names of the tensors that were asked for.
    File(TensorFile, BTreeSet<String>),
    Parts(Arc<dyn RangeReader>),
    /// A file whose header alone is read, to check that it matches the model.
    Outline(TensorFile, BTreeSet<String>),
    /// The builder of a model that is built elsewhere: see [`crate::Shards`].
    Elsewhere(VarBuilder<'static>, RequestedDivision),
}

impl WeightSource {
    pub(crate) fn has_parts(&self) -> bool {
        matches!(self, Self::File(..) | Self::Parts(_))
    }

    /// Returns a parameter's name in the whole model, for messages: a builder of a model that is built elsewhere knows only the
    /// last part of it.
    pub(crate) fn full_name(&self, name: &str) -> String {
        match self {
            Self::Elsewhere(builder, _) if !builder.prefix().is_empty() => {
                format!("{}.{name}", builder.prefix())
            }
            _ => name.to_string(),
        }
    }

    /// Reads these ranges of the flattened whole weight, concatenated.
    pub(crate) fn read(
        &mut self,
        name: &str,
        shape: &Shape,
        init: Init,
        dtype: DType,
        ranges: &[Range<usize>],
    ) -> Result<Tensor> {
        match self {
            Self::File(file, asked_for) => {
                asked_for.insert(name.to_string());
                read_ranges(file, name, shape.dims(), dtype, ranges)
            }
            Self::Parts(source) => Ok(source.read(name, shape, init, dtype, ranges)?),
            _ => Err(Error::invalid("the weights", "no parts", "this is a mistake in tensor-parallel")),
        }
    }
}

/// Reads ranges of a tensor whose dtype and whole shape are known.
pub(crate) fn read_ranges(
    file: &TensorFile,
    name: &str,
    dims: &[usize],
    dtype: DType,
    ranges: &[Range<usize>],
) -> Result<Tensor> {
    file.check(name, dims, dtype)?;
    Ok(file.read_ranges(name, ranges)?)
}

/// Division of the variable that is requested next.
pub(crate) type RequestedDivision = Arc<Mutex<Option<Division>>>;
