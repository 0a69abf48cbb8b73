//! Meeting file of `file://`, in which rank 0 publishes its address.

use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::net::SocketAddr;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::{Error, Result};

const LIMIT: u64 = 4096;

/// Only a process that can read the nonce can join: the file is accessible to its owner only, and each run has another
/// nonce.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Content {
    address: SocketAddr,
    nonce: [u8; 32],
}

/// The file as rank 0 holds it: removed on drop, unless another run has replaced it meanwhile.
#[derive(Debug)]
pub(super) struct MeetingFile {
    path: PathBuf,
    content: Content,
}

impl MeetingFile {
    /// Writes the file atomically: a reader sees the earlier one or all of this one. Replaces only another meeting file,
    /// or an empty file.
    pub(super) fn write(path: &Path, address: SocketAddr, nonce: [u8; 32]) -> Result<Self> {
        if let Some(what) = other_content(path) {
            let help = format!("{what}, which would be lost: give a path where nothing is yet");
            return Err(Error::invalid("the meeting's file", path.display(), help));
        }
        let failed = |reason: &dyn std::fmt::Display| {
            Error::invalid(
                "the meeting's file",
                path.display(),
                format!("give a path that can be written ({reason})"),
            )
        };
        let content = Content { address, nonce };
        let text = serde_json::to_vec(&content).map_err(|error| failed(&error))?;
        let mut name = path.file_name().ok_or_else(|| failed(&"it has no name"))?.to_owned();
        name.push(format!(
            ".{}-{:02x}{:02x}{:02x}{:02x}",
            std::process::id(),
            nonce[0],
            nonce[1],
            nonce[2],
            nonce[3]
        ));
        let draft = path.with_file_name(name);
        let written = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&draft);
        let written =
            written.and_then(|mut file| file.write_all(&text)).and_then(|()| fs::rename(&draft, path));
        written.map_err(|error| {
            let _ = fs::remove_file(&draft);
            failed(&error)
        })?;
        Ok(Self { path: path.into(), content })
    }
}

impl Drop for MeetingFile {
    fn drop(&mut self) {
        if read_content(&self.path, false).is_ok_and(|content| content == self.content) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Returns what is at this path that is not a meeting file.
fn other_content(path: &Path) -> Option<&'static str> {
    /// How each meeting file begins, whatever version of this program has written it.
    const BEGINNING: &[u8] = br#"{"address":"#;
    let kind = fs::symlink_metadata(path).ok()?.file_type();
    if kind.is_dir() {
        return Some("it is a folder");
    }
    if !kind.is_file() {
        return Some("it is a link or a device");
    }
    let mut text = Vec::new();
    let read = File::open(path).and_then(|file| file.take(BEGINNING.len() as u64).read_to_end(&mut text));
    let is_free = read.is_ok() && (text.is_empty() || text == BEGINNING);
    (!is_free).then_some("there is another file")
}

/// Returns where rank 0 listens, and the nonce. With `own_only`, a file that another user may have written is refused.
pub(super) fn read(path: &Path, own_only: bool) -> std::result::Result<(SocketAddr, [u8; 32]), String> {
    read_content(path, own_only).map(|content| (content.address, content.nonce))
}

fn read_content(path: &Path, own_only: bool) -> std::result::Result<Content, String> {
    let failed = |error: std::io::Error| match error.kind() {
        ErrorKind::NotFound => "rank 0 has not written the file yet".to_string(),
        _ => format!("the file cannot be read: {error}"),
    };
    if !fs::metadata(path).map_err(failed)?.is_file() {
        return Err("it is not a regular file".into());
    }
    let file = File::open(path).map_err(failed)?;
    let metadata = file.metadata().map_err(failed)?;
    if own_only && (metadata.uid() != rustix::process::geteuid().as_raw() || metadata.mode() & 0o022 != 0) {
        return Err("another user may have written the file, and the job has no secret".into());
    }
    let mut text = Vec::new();
    file.take(LIMIT).read_to_end(&mut text).map_err(failed)?;
    serde_json::from_slice(&text).map_err(|error| format!("the file holds something else ({error})"))
}

/// Fuzz target: arbitrary contents of the file.
#[cfg(any(test, fuzzing))]
pub(super) fn fuzz(text: &[u8]) {
    drop(serde_json::from_slice::<Content>(text));
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn address(port: u16) -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], port))
    }

    #[test]
    fn it_is_written_for_its_owner_and_removed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("meeting");
        assert!(read(&path, true).unwrap_err().contains("not written"));
        let file = MeetingFile::write(&path, address(7), [9; 32]).unwrap();
        assert_eq!(read(&path, true).unwrap(), (address(7), [9; 32]));
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        drop(file);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "nothing is left");
    }

    #[test]
    fn an_earlier_one_is_replaced_and_a_later_one_left() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("meeting");
        let earlier = MeetingFile::write(&path, address(7), [1; 32]).unwrap();
        let later = MeetingFile::write(&path, address(8), [2; 32]).unwrap();
        drop(earlier);
        assert_eq!(read(&path, true).unwrap().0, address(8));
        drop(later);
        assert!(!path.exists());
    }

    #[test]
    fn what_is_no_meetings_file_is_not_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let (path, link) = (folder.path().join("precious"), folder.path().join("link"));
        fs::write(&path, "weights").unwrap();
        std::os::unix::fs::symlink(&path, &link).unwrap();
        for (path, what) in [(&path, "another file"), (&link, "a link"), (&"/dev/null".into(), "a device")] {
            let message = MeetingFile::write(path, address(7), [0; 32]).unwrap_err().to_string();
            assert!(message.contains(what) && message.contains("give a path where nothing is"), "{message}");
        }
        assert_eq!(fs::read_to_string(&path).unwrap(), "weights");
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        // An empty file, as `mktemp` makes it.
        fs::write(&path, "").unwrap();
        drop(MeetingFile::write(&path, address(7), [0; 32]).unwrap());
        assert!(!path.exists());
    }

    #[test]
    fn a_path_that_cannot_be_written_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        for (path, what) in
            [(folder.path().join("no/such/folder"), "can be written"), (folder.path().into(), "a folder")]
        {
            let message = MeetingFile::write(&path, address(7), [0; 32]).unwrap_err().to_string();
            assert!(message.contains(path.to_str().unwrap()) && message.contains(what), "{message}");
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "no draft is left");
    }

    #[test]
    fn rubbish_and_other_users_files_are_not_believed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("meeting");
        for rubbish in [&b"{"[..], b"\xff\xff", &[b'['; 100_000], b"", br#"{"address":"x","nonce":[]}"#] {
            fs::write(&path, rubbish).unwrap();
            assert!(read(&path, false).is_err());
        }
        let _file = MeetingFile::write(&path, address(7), [0; 32]).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o622)).unwrap();
        assert!(read(&path, true).unwrap_err().contains("another user"));
        assert!(read(&path, false).is_ok());
        assert!(read(folder.path(), false).is_err());
    }
}
