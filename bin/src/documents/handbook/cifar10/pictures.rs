//! Sets of 32 x 32 pictures with class labels, stored as bytes.

use candle_core::{DType, Device, Tensor};
use sampler::{BoxError, Dataset};
use training::{FileError, TensorFile};

use super::model::ConvNet;

/// Height and width, in pixels.
pub const SIDE: usize = 32;
/// Bytes of a picture: all red values, then green, then blue.
pub const PICTURE_BYTES: usize = 3 * SIDE * SIDE;

/// Class names by label, as in the PyTorch handbook.
pub const CLASSES: [&str; ConvNet::CLASSES] =
    ["plane", "car", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"];

/// A set of pictures.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Pictures {
    /// Pixel data: each picture takes [`PICTURE_BYTES`] bytes, one colour plane after the other, row by row.
    pub bytes: Vec<u8>,
    /// Class of each picture, below [`ConvNet::CLASSES`].
    pub labels: Vec<u8>,
}

/// Pictures (batch, 3, 32, 32), and labels (batch).
pub type Batch = (Tensor, Tensor);

impl Pictures {
    /// Reads pictures, u8 of shape (pictures, 3, 32, 32), and labels, u8 of shape (pictures), by their names in the
    /// file.
    ///
    /// # Errors
    /// A file that does not fit.
    pub fn read(file: &TensorFile, pictures: &str, labels: &str) -> Result<Self, FileError> {
        let side = Some(SIDE);
        let x = file.tensor(pictures, &[None, Some(3), side, side], DType::U8, &Device::Cpu)?;
        let len = x.elem_count() / PICTURE_BYTES;
        if len == 0 {
            return Err(FileError::tensor(file.path(), pictures, "it has no pictures; give at least 1"));
        }
        let y = file.tensor(labels, &[Some(len)], DType::U8, &Device::Cpu)?;
        let values = |tensor: Tensor| {
            let values = tensor.flatten_all().and_then(|tensor| tensor.to_vec1::<u8>());
            values.map_err(|error| FileError::read(file.path(), error))
        };
        let pictures = Self { bytes: values(x)?, labels: values(y)? };
        let mut numbered = pictures.labels.iter().enumerate();
        if let Some((number, label)) = numbered.find(|(_, label)| usize::from(**label) >= ConvNet::CLASSES) {
            let reason = format!("sample {number} is of class {label}; classes are 0 to 9");
            return Err(FileError::tensor(file.path(), labels, reason));
        }
        Ok(pictures)
    }

    /// Returns the bytes of a picture.
    pub fn picture(&self, index: usize) -> &[u8] {
        &self.bytes[index * PICTURE_BYTES..(index + 1) * PICTURE_BYTES]
    }

    /// Returns the name of a picture's class.
    pub fn name(&self, index: usize) -> &'static str {
        CLASSES[usize::from(self.labels[index])]
    }

    /// Returns some pictures as model input: `ToTensor` and `Normalize` to -1..1, rounded as PyTorch does.
    ///
    /// # Errors
    /// Memory that a device does not have.
    pub fn batch(
        &self,
        indices: impl ExactSizeIterator<Item = usize>,
        device: &Device,
    ) -> candle_core::Result<Batch> {
        let len = indices.len();
        let mut x = Vec::with_capacity(len * PICTURE_BYTES);
        let mut labels = Vec::with_capacity(len);
        for index in indices {
            x.extend(self.picture(index).iter().map(|byte| (f32::from(*byte) / 255.0 - 0.5) / 0.5));
            labels.push(u32::from(self.labels[index]));
        }
        let x = Tensor::from_vec(x, (len, 3, SIDE, SIDE), device)?;
        Ok((x, Tensor::from_vec(labels, len, device)?))
    }
}

/// Samples are indices, so that the large pixel data is copied only once, when a batch is made.
impl Dataset for Pictures {
    type Item = usize;

    fn len(&self) -> usize {
        self.labels.len()
    }

    fn get(&self, index: usize) -> Result<usize, BoxError> {
        Ok(index)
    }
}
