//! Loading the training and test pictures, from a folder, a file or the seed, and batching them.

use std::sync::Arc;

use candle_core::{DType, Device};
use experiment::error::Result;
use experiment::options::LoaderOptions;
use experiment::trainer::Loader;
use experiment::variables::Variables;
use models::tutorials::cifar10::synthetic::Patterns;
use models::tutorials::cifar10::{Batch, PICTURE_BYTES, Pictures, SIDE, records};
use models::tutorials::convnet::ConvNet;
use sampler::DistributedSampler;
use training::{FileError, TensorFile};

use super::Cifar10Options;

/// What each process creates at the start.
pub struct Setup {
    pub(super) train: Arc<Pictures>,
    pub(super) test: Arc<Pictures>,
    pub(super) variables: Variables,
}

impl Setup {
    pub(super) fn new(options: &Cifar10Options) -> Result<Self> {
        let variables = Variables::new(&options.common)?;
        let (train, test) = match (&options.data_dir, &options.common.data) {
            (Some(dir), _) => records::read(dir)?,
            (None, Some(path)) => {
                let file = TensorFile::open(path)?;
                file.only(&["x", "y", "test_x", "test_y"])?;
                (tensors(&file, "x", "y")?, tensors(&file, "test_x", "test_y")?)
            }
            (None, None) => variables.generator.with(|generator| {
                let patterns = Patterns::draw(generator)?;
                let train = patterns.pictures(generator, options.samples)?;
                Ok::<_, experiment::error::Error>((
                    train,
                    patterns.pictures(generator, options.test_samples)?,
                ))
            })?,
        };
        variables.make(&options.common, ConvNet::new)?;
        Ok(Self { train: Arc::new(train), test: Arc::new(test), variables })
    }
}

fn tensors(file: &TensorFile, pictures: &str, labels: &str) -> Result<Pictures> {
    let side = Some(SIDE);
    let x = file.tensor(pictures, &[None, Some(3), side, side], DType::U8, &Device::Cpu)?;
    let len = x.elem_count() / PICTURE_BYTES;
    if len == 0 {
        return Err(FileError::tensor(file.path(), pictures, "it has no pictures; give at least 1").into());
    }
    let y = file.tensor(labels, &[Some(len)], DType::U8, &Device::Cpu)?.to_vec1::<u8>()?;
    if let Some((number, label)) =
        (0..).zip(&y).find(|(_, label): &(usize, &u8)| usize::from(**label) >= ConvNet::CLASSES)
    {
        let reason = format!("sample {number} is of class {label}; classes are 0 to 9");
        return Err(FileError::tensor(file.path(), labels, reason).into());
    }
    Ok(Pictures { bytes: x.flatten_all()?.to_vec1()?, labels: y })
}

/// Returns a loader for this rank's share of the pictures.
pub(super) fn loader(
    pictures: &Arc<Pictures>,
    sampler: DistributedSampler,
    batches: (usize, &Device),
    options: LoaderOptions,
) -> Result<Loader<Pictures, Batch>> {
    let all = pictures.clone();
    let make = move |indices: Vec<usize>, device: &Device| all.batch(indices.into_iter(), device);
    options.loader(pictures.clone(), sampler, batches, make)
}
