//! Log files of ranks that can no longer be written.

use std::process::Command;

use crate::common::{Folder, clean, text};

/// Returns a `launch` of a shell script on two ranks, with files limited to 4 KiB to simulate a full disk.
fn on_a_full_disk(folder: &Folder, options: &str, script: &str) -> Command {
    let mut command = Command::new("sh");
    let launch = format!(
        "trap '' XFSZ; ulimit -f 8; exec \"$@\" launch --nproc-per-node 2 --log-dir {} {options} -- sh -c '{script}'",
        folder.argument("logs")
    );
    clean(&mut command).args(["-c", &launch, "sh", env!("CARGO_BIN_EXE_girandole")]);
    command
}

#[test]
fn what_a_full_disk_has_no_room_for_is_shown_and_the_job_does_not_end_well() {
    let folder = Folder::new();
    let script = "i=0; while [ $i -lt 1000 ]; do i=$((i+1)); echo line $i; done; echo end >&2";
    for options in ["", "--tee 1", "--tee 2"] {
        let output = on_a_full_disk(&folder, options, script).output().unwrap();
        let remarks = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{remarks}");
        // Output that is not in the files is shown.
        let lines = text(&output.stdout);
        assert_eq!(lines.lines().filter(|line| *line == "line 1000").count(), 2, "{remarks}");
        let begun = lines.lines().filter(|line| *line == "line 1").count();
        assert_eq!(begun, if options == "--tee 1" { 2 } else { 0 });
        let warned =
            |line: &&str| line.starts_with("warning: ") && line.contains("stdout.log: it cannot be written");
        assert_eq!(remarks.lines().filter(warned).count(), 2, "{remarks}");
        let last = remarks.lines().last().unwrap();
        assert!(last.starts_with("error: ") && last.contains("stdout.log does not have all"), "{remarks}");
    }
}

#[test]
fn a_rank_that_fails_is_the_cause_all_the_same() {
    let folder = Folder::new();
    let script = "[ $RANK = 1 ] && exit 7; while echo line; do :; done";
    let output = on_a_full_disk(&folder, "", script).output().unwrap();
    let remarks = text(&output.stderr);
    assert_eq!(output.status.code(), Some(7), "{remarks}");
    assert!(remarks.contains("error: rank 1 (pid "), "{remarks}");
}
