//! Tests of `AtomicFile`: the state of the folder while a file is written, and after.

use super::*;

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

/// Creates the file as on a system without unnamed files.
fn named(path: &Path) -> AtomicFile {
    let place = Destination::find(path).unwrap();
    place.remove_stale();
    let (file, name) = place.named().unwrap();
    assert!(locks::take(&file));
    AtomicFile { place, file, name: Some(name) }
}

type Create = fn(&Path) -> AtomicFile;
const WAYS: [Create; 2] = [|path| AtomicFile::create(path).unwrap(), named];

#[test]
fn an_older_file_stays_until_the_new_one_is_whole() {
    for create in WAYS {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("w.st");
        fs::write(&path, "old").unwrap();
        let mut file = create(&path);
        file.write_all(b"half").unwrap();
        drop(file);
        assert_eq!((names(folder.path()), fs::read(&path).unwrap()), (vec!["w.st".into()], b"old".to_vec()));
        let mut file = create(&path);
        file.write_all(b"new, and longer").unwrap();
        file.seek(SeekFrom::Start(0)).unwrap();
        file.write_all(b"New").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"old");
        file.commit().unwrap();
        assert_eq!(names(folder.path()), ["w.st"]);
        assert_eq!(fs::read(&path).unwrap(), b"New, and longer");
    }
}

/// A file that another process still writes is not removed.
#[cfg(unix)]
#[test]
fn what_processes_left_that_have_ended_is_removed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("w.st");
    let others = [".w.st.tmp", ".w.st..tmp", ".w.st.backup.tmp", ".v.st.26520.tmp", "w.st.26520.tmp"];
    for name in others.iter().chain(&[".w.st.26520.tmp", ".w.st.00ab54a98ceb1f0a.tmp"]) {
        fs::write(folder.path().join(name), "").unwrap();
    }
    let mut living = named(&path);
    AtomicFile::check(&path).unwrap();
    AtomicFile::create(&path).unwrap().commit().unwrap();
    living.write_all(b"last").unwrap();
    let name = living.name.as_ref().unwrap().path().file_name().unwrap().to_str().unwrap().to_string();
    let mut expected: Vec<String> = others.iter().map(|name| name.to_string()).collect();
    expected.extend([name, "w.st".into()]);
    expected.sort();
    assert_eq!(names(folder.path()), expected);
    living.commit().unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"last");
}

#[test]
fn a_file_has_no_name_before_it_is_whole() {
    let folder = tempfile::tempdir().unwrap();
    if nameless(folder.path()).is_none() {
        eprintln!("this file system has no files without a name: nothing to test");
        return;
    }
    let mut file = AtomicFile::create(&folder.path().join("w")).unwrap();
    file.write_all(b"half").unwrap();
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[cfg(unix)]
#[test]
fn rights_and_links_stay() {
    use std::os::unix::fs::{PermissionsExt, symlink};

    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    for create in WAYS {
        let folder = tempfile::tempdir().unwrap();
        let [path, link, plain] = ["w", "link", "plain"].map(|name| folder.path().join(name));
        symlink("w", &link).unwrap();
        create(&link).commit().unwrap();
        fs::write(&plain, "").unwrap();
        assert_eq!(mode(&path), mode(&plain));
        fs::set_permissions(&path, Permissions::from_mode(0o640)).unwrap();
        create(&link).commit().unwrap();
        assert_eq!(mode(&path), 0o640);
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(names(folder.path()), ["link", "plain", "w"]);
    }
}

/// Runs in a child process, where no other test has unfinished files.
#[test]
fn drafts_are_removed_for_a_program_that_ends() {
    const ALONE: &str = "GIRANDOLE_TEST_ALONE";
    if std::env::var_os(ALONE).is_none() {
        let test = "file::output::tests::drafts_are_removed_for_a_program_that_ends";
        let mut child = std::process::Command::new(std::env::current_exe().unwrap());
        let output = child.args([test, "--exact", "--nocapture"]).env(ALONE, "1").output().unwrap();
        return assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let (begun, other, whole) = (named(&path("a.st")), named(&path("b.st")), named(&path("c.st")));
    whole.commit().unwrap();
    assert_eq!(names(folder.path()).len(), 3);
    remove_drafts();
    assert_eq!(names(folder.path()), ["c.st"]);
    // A file that now has the name belongs to another process.
    let name = begun.name.as_ref().unwrap().path().to_path_buf();
    fs::write(&name, "another's").unwrap();
    drop(begun);
    assert!(name.exists());
    assert!(other.commit().is_err());
}

#[cfg(unix)]
#[test]
fn a_pipe_that_nobody_reads_is_not_waited_for_without_end() {
    let folder = tempfile::tempdir().unwrap();
    let pipe = folder.path().join("pipe");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(true);
    let error = pipes::open(&pipe, &options, Duration::from_millis(20)).unwrap_err();
    assert_eq!(error.to_string(), "it is a pipe that nobody reads; start what reads it first");
    // More than a pipe buffers, and a reader that opens it later.
    let bytes: Vec<u8> = (0..1 << 20).map(|at| at as u8).collect();
    let reader = std::thread::spawn({
        let pipe = pipe.clone();
        move || {
            std::thread::sleep(Duration::from_millis(50));
            fs::read(pipe).unwrap()
        }
    });
    write_output(&pipe, &bytes).unwrap();
    assert_eq!(reader.join().unwrap(), bytes);
}
