//! Testing the trained net, distributed over all ranks.

use std::path::Path;

use candle_core::{DType, Device};
use candle_nn::{Module, VarMap};
use comm::Communicator;
use ddp::{Ddp, DdpConfig};
use experiment::console::say;
use experiment::error::Result;
use experiment::rank::Rank;
use girandole::validation::{Validation, ValidationConfig, argmax, validate};
use models::tutorials::cifar10::{CLASSES, Pictures, SIDE};
use models::tutorials::convnet::ConvNet;
use models::tutorials::python::Fixed;
use report::{Classified, write_pictures};
use sampler::{Generator, SharedGenerator};
use training::{TorchInit, load_weights};

use super::Cifar10Options;

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
    (pictures, device): (&Pictures, &Device),
) -> Result<Validation> {
    let net = net.model()?;
    let samples = pictures.labels.len();
    let tested = tested(&*rank.comm, net, pictures, device)?;
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

fn tested(
    comm: &dyn Communicator,
    net: &ConvNet,
    pictures: &Pictures,
    device: &Device,
) -> Result<Validation> {
    let samples = pictures.labels.len();
    let config = ValidationConfig { samples, batch_size: BATCH_SIZE, classes: ConvNet::CLASSES };
    validate(comm, &config, |range| {
        let (x, labels) = pictures.batch(range, device)?;
        Ok((net.forward(&x)?, labels))
    })
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

#[cfg(test)]
mod tests {
    use comm::Local;

    use models::tutorials::cifar10::synthetic::Patterns;

    use super::*;

    /// Uses set sizes that no number of ranks divides; the loss must be bitwise equal.
    #[test]
    fn any_number_of_ranks_tests_as_one_does() {
        let mut generator = Generator::new(1);
        let patterns = Patterns::draw(&mut generator).unwrap();
        let vars = VarMap::new();
        let generator = SharedGenerator::from(generator);
        let net = ConvNet::new(TorchInit::var_builder(&generator, &vars, DType::F32, &Device::Cpu)).unwrap();
        for len in [1, 53, 241] {
            let pictures = generator.with(|generator| patterns.pictures(generator, len)).unwrap();
            let on =
                |ranks| Local::run(ranks, |comm| Ok(tested(comm, &net, &pictures, &Device::Cpu).unwrap()));
            let alone = on(1).unwrap().remove(0);
            assert_eq!(alone.total().samples, len as u64);
            for ranks in 2..=5 {
                for other in on(ranks).unwrap() {
                    assert_eq!(other.loss_sum.to_bits(), alone.loss_sum.to_bits(), "{ranks} ranks, {len}");
                    assert_eq!(other, alone);
                }
            }
            let names = predict(&net, &pictures, len, &Device::Cpu).unwrap();
            let right = names.iter().enumerate().filter(|(index, name)| pictures.name(*index) == **name);
            assert_eq!(right.count() as u64, alone.total().correct);
        }
    }
}
