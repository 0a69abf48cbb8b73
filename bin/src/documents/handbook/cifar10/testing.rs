//! Testing the trained net, distributed over all ranks.

use std::path::Path;

use crate::documents::shared::validation::{Validation, ValidationConfig, argmax, validate};
use candle_core::{DType, Device};
use candle_nn::{Module, VarMap};
use cli::prelude::*;
use ddp::{Ddp, DdpConfig};
use sampler::{Generator, SharedGenerator};
use training::{TorchInit, load_weights};

use super::Cifar10Options;
use super::grid::{Classified, write_pictures};
use super::model::ConvNet;
use super::pictures::{CLASSES, Pictures, SIDE};
use crate::documents::shared::python::Fixed;

/// Pictures per forward pass.
const BATCH_SIZE: usize = 50;
/// Number of class names printed: the handbook's batch size.
const NAMED: usize = 4;

/// Builds the net with saved weights, on every rank.
pub(super) fn load(path: &Path, rank: &Rank, device: &Device) -> Result<Ddp<ConvNet>> {
    let (vars, generator) = (VarMap::new(), SharedGenerator::from(Generator::new(0)));
    // The generated initial values are all replaced; candle's own builder would generate them on the device.
    let builder = || TorchInit::var_builder(&generator, &vars, DType::F32, device);
    // Only rank 0 reads the file, as other machines may not have it; `Ddp::new` broadcasts its weights.
    if rank.is_first() {
        ConvNet::new(builder())?;
        load_weights(path, &vars)?;
    }
    Ok(Ddp::new(rank.comm.clone(), builder(), &DdpConfig::default(), ConvNet::new)?)
}

/// Tests the net; rank 0 prints the results and draws the grid.
pub(super) fn test(
    options: &Cifar10Options,
    rank: &Rank,
    net: &Ddp<ConvNet>,
    pictures: &Pictures,
    device: &Device,
) -> Result<Validation> {
    let net = net.model()?;
    let samples = pictures.labels.len();
    let config = ValidationConfig { samples, batch_size: BATCH_SIZE, classes: ConvNet::CLASSES };
    let tested = validate(&*rank.comm, &config, |range| {
        let (x, labels) = pictures.batch(range, device)?;
        Result::Ok((net.forward(&x)?, labels))
    })?;
    if !rank.is_first() {
        return Ok(tested);
    }
    let grid = options.picture.as_deref().map(|path| (path, options.pictures));
    let shown = grid.map_or(0, |(_, pictures)| pictures).max(NAMED).min(samples);
    let predicted = predict(net, pictures, shown, device)?;
    say_names("GroundTruth:", (0..shown).map(|index| pictures.name(index)))?;
    say_names("Predicted:", predicted.iter().copied())?;
    say_accuracy(&tested)?;
    if let Some((path, most)) = grid {
        let classified = |index| Classified {
            bytes: pictures.picture(index),
            name: pictures.name(index),
            predicted: predicted[index],
        };
        write_pictures(path, SIDE, &(0..shown.min(most)).map(classified).collect::<Vec<_>>())?;
    }
    Ok(tested)
}

/// Returns the predicted class names of the first `count` pictures.
fn predict(net: &ConvNet, pictures: &Pictures, count: usize, device: &Device) -> Result<Vec<&'static str>> {
    let mut names = Vec::with_capacity(count);
    for first in (0..count).step_by(BATCH_SIZE) {
        let (x, _) = pictures.batch(first..(first + BATCH_SIZE).min(count), device)?;
        let logits = net.forward(&x)?.to_dtype(DType::F64)?.to_vec2::<f64>()?;
        names.extend(logits.iter().map(|logits| CLASSES[argmax(logits)]));
    }
    Ok(names)
}

fn say_names<'a>(what: &str, names: impl Iterator<Item = &'a str>) -> Result<()> {
    let names: Vec<String> = names.take(NAMED).map(|name| format!("{name:>5}")).collect();
    say(format_args!("{what:<12}  {}", names.join(" ")))
}

fn say_accuracy(tested: &Validation) -> Result<()> {
    let total = tested.total();
    say(format_args!(
        "Accuracy on the {} test pictures: {:.1} % (loss {})",
        total.samples,
        100.0 * total.accuracy(),
        Fixed::<3>(tested.loss())
    ))?;
    for (name, class) in CLASSES.iter().zip(&tested.classes) {
        match class.samples {
            0 => say(format_args!("Accuracy of {name:>5}: no test pictures"))?,
            samples => say(format_args!(
                "Accuracy of {name:>5}: {:.1} % ({} of {samples})",
                100.0 * class.accuracy(),
                class.correct
            ))?,
        }
    }
    Ok(())
}
