//! Where the weights of a builder come from.

use std::ops::Range;
use std::sync::{Arc, Mutex};

use candle_core::{DType, Shape, Tensor};
use candle_nn::{Init, VarBuilder, VarMap};
use training::build::PartSource;

use crate::division::Division;
use crate::file::ShardedFile;
use crate::{Error, Result};

/// Where a builder has its weights from.
pub(crate) enum Source {
    /// The map holds one whole weight at a time.
    Random {
        builder: VarBuilder<'static>,
        scratch: VarMap,
    },
    File(ShardedFile),
    Parts(Arc<dyn PartSource>),
    /// A file of which nothing is read but what it has.
    Outline(ShardedFile),
    /// Of a model that is built elsewhere: see [`crate::Shards`].
    Elsewhere(VarBuilder<'static>, Asked),
}

impl Source {
    pub(crate) fn has_parts(&self) -> bool {
        matches!(self, Self::File(_) | Self::Parts(_))
    }

    /// Numbers of a weight in these ranges of its flat whole, one after the other.
    pub(crate) fn read(
        &mut self,
        name: &str,
        shape: &Shape,
        init: Init,
        dtype: DType,
        ranges: &[Range<usize>],
    ) -> Result<Tensor> {
        match self {
            Self::File(file) => file.read(name, shape.dims(), dtype, ranges),
            Self::Parts(source) => Ok(source.read(name, shape, init, dtype, ranges)?),
            _ => Err(Error::invalid("the weights", "no parts", "this is a mistake in tensor-parallel")),
        }
    }
}

/// How the variable that is asked for next is divided.
pub(crate) type Asked = Arc<Mutex<Option<Division>>>;
