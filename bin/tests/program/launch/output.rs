//! Output of ranks, and their standard input.

use std::fs::File;
use std::io::Write;
use std::process::Stdio;

use sampler::Generator;

use crate::common::{Folder, girandole, succeed, text};
use crate::launch::shell::shell;

#[test]
fn bytes_go_through_as_they_are() {
    let folder = Folder::new();
    let mut generator = Generator::new(1);
    // Bytes of all values, including newlines and the start of an internal message; then a line longer than any pipe.
    let mut bytes: Vec<u8> = (0..3 << 18).flat_map(|_| generator.next_u32().to_le_bytes()).collect();
    bytes.resize(bytes.len() + (5 << 20), b'x');
    std::fs::write(folder.path("bytes"), &bytes).unwrap();
    let file = folder.argument("bytes");
    let output = succeed(girandole().args(["launch", "--", "cat", &file]));
    assert!(output.stdout == bytes, "{} bytes of {}", output.stdout.len(), bytes.len());
}

#[test]
fn a_long_line_stays_whole_while_others_print() {
    let folder = Folder::new();
    let wait = |name: &str| format!("until [ -e {} ]; do sleep 0.01; done", folder.argument(name));
    let some = "head -c 2500000 /dev/zero | tr '\\0' x";
    let (begun, printed) = (folder.argument("begun"), folder.argument("printed"));
    let script = format!(
        "case $RANK in 0) {some}; : > {begun}; {}; {some}; echo end;; *) {}; i=0; while [ $i -lt 2000 ]; \
         do i=$((i+1)); echo line $i; done; : > {printed};; esac",
        wait("printed"),
        wait("begun"),
    );
    let printed = text(&succeed(&mut shell(2, &script)).stdout);
    let long: Vec<&str> = printed.lines().filter(|line| line.starts_with('x')).collect();
    assert_eq!(long.iter().map(|line| line.len()).collect::<Vec<_>>(), [5_000_003]);
    assert_eq!(printed.lines().filter(|line| line.starts_with("line ")).count(), 2000);
}

#[test]
fn what_is_said_after_an_unfinished_line_is_a_line() {
    let script = "[ $RANK = 1 ] || exec sleep 1000; printf begun; printf half >&2; exit 3";
    let output = shell(2, script).output().unwrap();
    assert_eq!(text(&output.stdout), "begun");
    let remarks = text(&output.stderr);
    let expected = "half\nrank 1's last lines on stderr:\n    half\nerror: rank 1 (pid ";
    assert!(remarks.starts_with(expected), "{remarks}");
}

#[test]
fn input_that_nobody_gets_is_told() {
    let note = "note: the standard input of launch is not passed on to the ranks";
    let folder = Folder::new();
    std::fs::write(folder.path("input"), "hello").unwrap();
    let file = File::open(folder.path("input")).unwrap();
    let output = succeed(girandole().args(["launch", "--", "cat"]).stdin(file));
    assert!(output.stdout.is_empty() && text(&output.stderr).starts_with(note));

    let mut command = girandole();
    command.args(["launch", "--", "cat"]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    child.stdin.as_mut().unwrap().write_all(b"hello").unwrap();
    let input = child.stdin.take();
    let output = child.wait_with_output().unwrap();
    drop(input);
    assert!(output.stdout.is_empty() && text(&output.stderr).starts_with(note));

    let quiet = succeed(girandole().args(["launch", "--", "cat"]).stdin(Stdio::null()));
    assert_eq!(text(&quiet.stderr), "");
}
