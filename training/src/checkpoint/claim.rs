//! Claim on a folder of checkpoints: two runs must not write to it at the same time.
//!
//! Each process of a run holds a shared lock (`flock`) on a file of the folder. The one that begins the run first takes that
//! lock for itself alone, which succeeds only if no process of another run is alive: the system gives up the locks of a
//! process when it ends, however it does. So a claim needs no owner: it lasts as long as any rank of the run.

use std::collections::HashMap;
use std::fs::{self, File, TryLockError};
use std::io::{ErrorKind, Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use super::{Checkpoints, io};
use crate::{Error, Result};
use ops::kernels::lock;

/// Name of the locked file.
const FILE: &str = "in-use";
/// How long to wait for processes that were killed, and are ending.
const ENDING_TIME: Duration = Duration::from_secs(1);
const POLL: Duration = Duration::from_millis(20);

/// The claims of this process, by folder: its checkpoints of one folder share one.
static CLAIMS: Mutex<Option<HashMap<PathBuf, Weak<Claim>>>> = Mutex::new(None);

/// Keeps a folder in use by this run, as long as it exists.
#[derive(Debug)]
pub(super) struct Claim {
    path: PathBuf,
    file: File,
}

/// Who began the run that uses a folder.
#[derive(Debug, Serialize, Deserialize)]
struct Owner {
    host: String,
    process: u32,
    /// When, in seconds since 1970.
    since: u64,
}

impl Checkpoints {
    /// Claims the folder for this run, until the last clone of this object is dropped in the last of its processes. Called by
    /// the process that begins the run; the others then call [`share_claim`](Self::share_claim). [`save`](Self::save) and
    /// [`begin`](Self::begin) call it, unless the process has a claim.
    ///
    /// The claim is a lock of the operating system (`flock`), which NFS passes to other hosts. A process that was killed
    /// holds none. On a file system without locks a warning says so, and a second run is not noticed.
    ///
    /// # Errors
    /// [`Error::InUse`] if another run is alive that uses the folder; [`Error::Io`].
    pub fn claim(&self) -> Result<()> {
        self.hold(true)
    }

    /// Claims the folder for a run that another process has begun.
    ///
    /// # Errors
    /// Those of [`claim`](Self::claim).
    pub fn share_claim(&self) -> Result<()> {
        self.hold(false)
    }

    fn hold(&self, begins: bool) -> Result<()> {
        let mut own = lock(&self.claim);
        if own.is_none() {
            *own = claim(&self.config.dir, begins)?;
        }
        Ok(())
    }
}

/// Returns this process's claim on a folder, or makes one; `None` where the file system has no locks.
fn claim(dir: &Path, begins: bool) -> Result<Option<Arc<Claim>>> {
    let dir = dir.canonicalize().map_err(io("find the folder", dir))?;
    let mut claims = lock(&CLAIMS);
    let claims = claims.get_or_insert_default();
    if let Some(claim) = claims.get(&dir).and_then(Weak::upgrade) {
        return Ok(Some(claim));
    }
    let claim = Claim::make(&dir, begins)?.map(Arc::new);
    if let Some(claim) = &claim {
        claims.retain(|_, claim| claim.strong_count() > 0);
        claims.insert(dir, Arc::downgrade(claim));
    }
    Ok(claim)
}

impl Claim {
    fn make(dir: &Path, begins: bool) -> Result<Option<Self>> {
        let (path, until) = (dir.join(FILE), Instant::now() + ENDING_TIME);
        loop {
            let open = File::options().read(true).write(true).create(true).truncate(false).open(&path);
            let file = open.map_err(io("open", &path))?;
            match if begins { file.try_lock() } else { file.try_lock_shared() } {
                // The last process of another run may have removed the file meanwhile.
                Ok(()) if !is_at(&file, &path) => {}
                Ok(()) => {
                    let claim = Self { path, file };
                    if begins {
                        claim.sign();
                        // Another run that tries at this moment may come first.
                        if claim.file.try_lock_shared().is_err() {
                            return Err(in_use(dir, &claim.file));
                        }
                    }
                    return Ok(Some(claim));
                }
                Err(TryLockError::WouldBlock) if Instant::now() < until => std::thread::sleep(POLL),
                Err(TryLockError::WouldBlock) => return Err(in_use(dir, &file)),
                Err(TryLockError::Error(error)) if error.kind() == ErrorKind::Interrupted => {}
                Err(TryLockError::Error(error)) => {
                    let dir = dir.display();
                    tracing::warn!(
                        "{dir}: its file system has no locks ({error}), so another run that writes there is not noticed"
                    );
                    return Ok(None);
                }
            }
        }
    }

    /// Writes who begins the run, which is only for the message of another one.
    fn sign(&self) {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let owner = Owner { host: host_name(), process: std::process::id(), since };
        let write = || -> std::io::Result<()> {
            let text = serde_json::to_vec(&owner)?;
            self.file.set_len(0)?;
            (&self.file).rewind()?;
            (&self.file).write_all(&text)
        };
        if let Err(error) = write() {
            tracing::debug!("{}: {error}", self.path.display());
        }
    }
}

impl Drop for Claim {
    /// Removes the file, if no other process of the run has it.
    fn drop(&mut self) {
        if self.file.try_lock().is_ok() && is_at(&self.file, &self.path) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Whether a path still leads to an open file.
fn is_at(file: &File, path: &Path) -> bool {
    let Ok((there, own)) = fs::metadata(path).and_then(|there| Ok((there, file.metadata()?))) else {
        return false;
    };
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt;
        (there.dev(), there.ino()) == (own.dev(), own.ino())
    }
    #[cfg(not(unix))]
    {
        there.is_file() && own.is_file()
    }
}

fn host_name() -> String {
    #[cfg(unix)]
    {
        rustix::system::uname().nodename().to_string_lossy().into_owned()
    }
    #[cfg(not(unix))]
    {
        std::env::var("COMPUTERNAME").unwrap_or_default()
    }
}

/// Returns the error of a folder that another run uses, with what that run has written of itself.
fn in_use(dir: &Path, mut file: &File) -> Error {
    let mut text = String::new();
    let read = file.rewind().and_then(|()| file.read_to_string(&mut text));
    let owner: Option<Owner> = read.ok().and_then(|_| serde_json::from_str(&text).ok());
    let owner = owner.map_or_else(String::new, |Owner { host, process, since }| {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let ago = match now.saturating_sub(since) {
            seconds @ 0..120 => format!("{seconds} s"),
            seconds @ 120..7200 => format!("{} min", seconds / 60),
            seconds => format!("{} h", seconds / 3600),
        };
        format!(", begun {ago} ago by process {process} on host {host}")
    });
    Error::InUse { dir: dir.to_path_buf(), owner }
}

#[cfg(test)]
mod tests {
    use std::fs::write;

    use super::super::{Checkpoint, CheckpointConfig};
    use super::*;

    fn open(dir: &Path) -> Checkpoints {
        Checkpoints::open(CheckpointConfig { dir: dir.into(), ..CheckpointConfig::default() }).unwrap()
    }

    /// The file as another process has it.
    fn of_another_run(dir: &Path) -> File {
        let file = File::options().write(true).create(true).truncate(false).open(dir.join(FILE)).unwrap();
        file.try_lock_shared().unwrap();
        file
    }

    #[test]
    fn a_folder_that_a_living_run_uses_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let checkpoints = open(folder.path());
        let other = of_another_run(folder.path());
        let owner = Owner { host: "a".into(), process: 7, since: 0 };
        write(folder.path().join(FILE), serde_json::to_string(&owner).unwrap()).unwrap();
        let error = checkpoints.save(&Checkpoint::default()).unwrap_err().to_string();
        assert!(error.contains("another run keeps its checkpoints there, begun "), "{error}");
        assert!(error.contains(" h ago by process 7 on host a: wait for it"), "{error}");
        assert!(checkpoints.list().unwrap().is_empty());
        // Those of the same run share it.
        checkpoints.share_claim().unwrap();
        drop(other);
        checkpoints.save(&Checkpoint::default()).unwrap();
    }

    #[test]
    fn what_a_dead_run_has_left_is_no_claim() {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path().join(FILE), "not even an owner").unwrap();
        let checkpoints = open(folder.path());
        checkpoints.claim().unwrap();
        let owner: Owner = serde_json::from_slice(&fs::read(folder.path().join(FILE)).unwrap()).unwrap();
        assert_eq!((owner.process, owner.host), (std::process::id(), host_name()));
        // Another object of this process has the same claim.
        open(folder.path()).save(&Checkpoint::default()).unwrap();
        assert!(folder.path().join(FILE).exists());
        drop(checkpoints);
        assert!(!folder.path().join(FILE).exists());
    }

    #[test]
    fn the_last_process_of_a_run_removes_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let other = of_another_run(folder.path());
        let checkpoints = open(folder.path());
        checkpoints.share_claim().unwrap();
        drop(checkpoints);
        assert!(folder.path().join(FILE).exists());
        drop(other);
        let checkpoints = open(folder.path());
        checkpoints.share_claim().unwrap();
        drop(checkpoints);
        assert!(!folder.path().join(FILE).exists());
    }
}
