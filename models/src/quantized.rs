//! Weights that are read in few bits: each is read whole, quantized unless its file has it so, and only then divided over ranks.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex};

use candle_core::{Device, Result, Shape, Tensor};
use ops::quantized::{Format, QuantizedMatrix};
use training::internal::lock;

use crate::names;

/// The weight that was read last, and its name: its blocks and its scales are asked for one after the other.
#[derive(Default)]
pub(crate) struct Quantized(Mutex<Option<(String, Arc<QuantizedMatrix>)>>);

impl Quantized {
    /// Returns the bytes of a part of a weight in few bits, the blocks or the scales; `None` if the name is not that of one.
    /// `shapes` are those of the weights, which `read` reads or quantizes.
    pub(crate) fn part(
        &self,
        name: &str,
        shapes: &BTreeMap<String, Vec<usize>>,
        read: impl FnOnce(&str, &Shape, Format) -> Result<QuantizedMatrix>,
    ) -> Option<Result<Tensor>> {
        // The scales of an expert's weight are a matrix.
        let (layer, part) = name
            .strip_suffix(".weight")
            .filter(|name| name.ends_with(".scales"))
            .unwrap_or(name)
            .rsplit_once('.')?;
        let of =
            |format: Format| Some((format, layer.strip_suffix(names::quantized(format))?.strip_suffix('.')?));
        let (format, layer) = names::FORMATS.into_iter().find_map(of)?;
        let weight = format!("{layer}.weight");
        let dims = shapes.get(&weight)?;
        let matrix = self.matrix(format, &weight, || read(&weight, &Shape::from(&dims[..]), format));
        Some(matrix.and_then(|matrix| match part {
            names::SCALES => Tensor::new(matrix.scales(), &Device::Cpu),
            _ => Tensor::new(matrix.blocks(), &Device::Cpu),
        }))
    }

    fn matrix(
        &self,
        format: Format,
        weight: &str,
        read: impl FnOnce() -> Result<QuantizedMatrix>,
    ) -> Result<Arc<QuantizedMatrix>> {
        let mut last = lock(&self.0);
        if let Some((_, matrix)) =
            last.as_ref().filter(|(name, known)| name == weight && known.format() == format)
        {
            return Ok(matrix.clone());
        }
        // Freed before the next one is read.
        *last = None;
        let named = |error| candle_core::Error::Msg(format!("{weight}: {error}"));
        let matrix = Arc::new(read().map_err(named)?);
        *last = Some((weight.into(), matrix.clone()));
        Ok(matrix)
    }
}

impl fmt::Debug for Quantized {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Quantized").finish_non_exhaustive()
    }
}
