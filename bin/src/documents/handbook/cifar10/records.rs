//! Reader for the "binary version" of CIFAR-10.
//!
//! A file consists of records of 3073 bytes: a label, then 1024 bytes each of red, green and blue. Source: A.
//! Krizhevsky, "Learning Multiple Layers of Features from Tiny Images" (2009).

use std::fs;
use std::path::{Path, PathBuf};

use training::FileError;

use super::model::ConvNet;
use super::pictures::{PICTURE_BYTES, Pictures};

/// Numbers of pictures in the complete training set and test set.
pub(super) const WHOLE: [usize; 2] = [50_000, 10_000];
const RECORD: usize = 1 + PICTURE_BYTES;
const TRAIN: [&str; 5] =
    ["data_batch_1.bin", "data_batch_2.bin", "data_batch_3.bin", "data_batch_4.bin", "data_batch_5.bin"];
const TEST: &str = "test_batch.bin";
/// The folder inside the archive.
const FOLDER: &str = "cifar-10-batches-bin";
/// The folder of the Python version, which torchvision unpacks: its files are pickles, which can run code when they
/// are read.
const PICKLES: &str = "cifar-10-batches-py";
/// One of its files.
const PICKLED: &str = "data_batch_1";

/// Reads the training set and the test set from a folder, or from the archive's folder inside it.
///
/// # Errors
/// A folder that lacks one of the files, a file that cannot be read or is damaged.
pub(super) fn read(dir: &Path) -> Result<(Pictures, Pictures), FileError> {
    let dir = locate(dir)?;
    let mut train = Pictures::default();
    for name in TRAIN {
        append(&dir.join(name), &mut train)?;
    }
    let mut test = Pictures::default();
    append(&dir.join(TEST), &mut test)?;
    Ok((train, test))
}

/// Returns the paths of all data files of a folder.
pub(super) fn files(dir: &Path) -> Vec<PathBuf> {
    let dir = locate(dir).unwrap_or_else(|_| dir.to_path_buf());
    TRAIN.into_iter().chain([TEST]).map(|name| dir.join(name)).collect()
}

/// Finds the folder with the files, and checks that all of them exist.
fn locate(dir: &Path) -> Result<PathBuf, FileError> {
    let found = fs::metadata(dir).map_err(|error| {
        FileError::read(dir, format!("{error}; without --data-dir, pictures are drawn in place of CIFAR-10"))
    })?;
    if !found.is_dir() {
        return Err(FileError::read(dir, format!("it is no folder; give the one with {TEST}")));
    }
    let inner = dir.join(FOLDER);
    let dir = if !dir.join(TEST).exists() && inner.is_dir() { inner } else { dir.to_path_buf() };
    let missing: Vec<&str> =
        TRAIN.into_iter().chain([TEST]).filter(|name| !dir.join(name).exists()).collect();
    if missing.is_empty() {
        return Ok(dir);
    }
    let missing = missing.join(", ");
    if dir.join(PICKLED).exists() || dir.join(PICKLES).is_dir() {
        let here = if dir.join(PICKLED).exists() { "it is" } else { "it has" };
        return Err(FileError::read(
            &dir,
            format!(
                "{here} {PICKLES}, the version of CIFAR-10 for Python that torchvision unpacks, whose pickles are not read; \
                 unpack cifar-10-binary.tar.gz, the binary version, there"
            ),
        ));
    }
    Err(FileError::read(
        &dir,
        format!("it lacks {missing}; unpack cifar-10-binary.tar.gz, the binary version of CIFAR-10, there"),
    ))
}

fn append(path: &Path, pictures: &mut Pictures) -> Result<(), FileError> {
    let bytes = training::internal::read_input(path).map_err(|error| FileError::read(path, error))?;
    if bytes.is_empty() || !bytes.len().is_multiple_of(RECORD) {
        let len = bytes.len();
        let reason = format!("{len} bytes are no whole number of records of {RECORD} bytes; get it again");
        return Err(FileError::read(path, reason));
    }
    for (number, record) in bytes.chunks_exact(RECORD).enumerate() {
        if usize::from(record[0]) >= ConvNet::CLASSES {
            let reason = format!("record {number} has the label {}; labels are 0 to 9", record[0]);
            return Err(FileError::read(path, reason));
        }
        pictures.labels.push(record[0]);
        pictures.bytes.extend_from_slice(&record[1..]);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(label: u8, byte: u8) -> Vec<u8> {
        [&[label][..], &[byte; PICTURE_BYTES]].concat()
    }

    /// Creates a folder of files with one or two records each.
    fn folder() -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (number, name) in (0..).zip(TRAIN) {
            fs::write(folder.path().join(name), record(number, 10 * number)).unwrap();
        }
        fs::write(folder.path().join(TEST), [record(9, 1), record(8, 2)].concat()).unwrap();
        folder
    }

    fn refused(folder: &tempfile::TempDir) -> String {
        read(folder.path()).unwrap_err().to_string()
    }

    #[test]
    fn all_records_are_read_in_order() {
        let inner = folder();
        let (train, test) = read(inner.path()).unwrap();
        assert_eq!((train.labels.as_slice(), test.labels.as_slice()), (&[0, 1, 2, 3, 4][..], &[9, 8][..]));
        assert_eq!((train.picture(3), test.picture(1)), (&[30; PICTURE_BYTES][..], &[2; PICTURE_BYTES][..]));
        assert_eq!((train.name(1), test.name(0)), ("car", "truck"));

        let outer = tempfile::tempdir().unwrap();
        fs::rename(inner.keep(), outer.path().join(FOLDER)).unwrap();
        assert_eq!(read(outer.path()).unwrap(), (train, test));
    }

    #[test]
    fn each_missing_file_is_named() {
        let folder = folder();
        fs::remove_file(folder.path().join(TRAIN[1])).unwrap();
        fs::remove_file(folder.path().join(TEST)).unwrap();
        let line = refused(&folder);
        assert!(line.contains("it lacks data_batch_2.bin, test_batch.bin; unpack"), "{line}");
        let line = read(&folder.path().join("none")).unwrap_err().to_string();
        assert!(line.starts_with("cannot read ") && line.contains("No such file"), "{line}");
        let line = read(&folder.path().join(TRAIN[0])).unwrap_err().to_string();
        assert!(line.contains("no folder"), "{line}");
    }

    #[test]
    fn the_version_for_python_is_known_by_its_name() {
        let outer = tempfile::tempdir().unwrap();
        let inner = outer.path().join(PICKLES);
        fs::create_dir(&inner).unwrap();
        let line = refused(&outer);
        assert!(line.contains("it has cifar-10-batches-py, the version of CIFAR-10 for Python"), "{line}");
        fs::write(inner.join(PICKLED), "").unwrap();
        let line = read(&inner).unwrap_err().to_string();
        assert!(
            line.contains("it is cifar-10-batches-py") && line.contains("cifar-10-binary.tar.gz"),
            "{line}"
        );
    }

    #[test]
    fn a_file_that_is_not_whole_or_has_a_wrong_label() {
        for (bytes, part) in [
            (record(1, 0)[..100].to_vec(), "100 bytes are no whole number"),
            (vec![], "0 bytes are no whole number"),
            ([record(1, 0), vec![2]].concat(), "3074 bytes"),
            ([record(1, 0), record(10, 0)].concat(), "record 1 has the label 10; labels are 0 to 9"),
        ] {
            let folder = folder();
            fs::write(folder.path().join(TRAIN[4]), bytes).unwrap();
            let line = refused(&folder);
            assert!(line.contains(part) && line.contains("data_batch_5.bin"), "{line}");
        }
    }
}
