//! Ranks that start ranks.

use crate::process::{end, lines, program, text};

/// Checks that the ranks refuse to start the same command again, in whatever way it is started.
fn is_refused(role: &str, got: &str) {
    let [output] = end([program(role)]);
    let said = format!("{}{}", text(&output.stdout), text(&output.stderr));
    assert!(!said.contains("too deep"), "{role}: {said}");
    let line = format!("at depth 1: spawn: got {got}");
    let count = said.lines().filter(|other| other.starts_with(&line)).count();
    assert!((1..=2).contains(&count), "{role}: {said}");
    assert!(said.contains("launch::run"), "{role}: {said}");
    // The first cause: the rank has ended with the exit code for invalid arguments.
    assert!(said.contains(" exited with code 2"), "{role}: {said}");
    assert_eq!(output.status.code(), Some(1), "{role}: {said}");
}

/// Checks that a process started as a rank by others refuses: it would start one job for each rank.
fn is_refused_under(variables: &[(&str, &str)]) {
    let mut command = program("spawn");
    command.envs(variables.iter().copied());
    let [output] = end([command]);
    let said = text(&output.stdout);
    assert!(
        said.starts_with("at depth 0: spawn: got a call in rank 1; ") && said.contains("launch::run"),
        "{said}"
    );
    assert_eq!((said.lines().count(), output.status.code()), (1, Some(2)), "{said}");
}

pub(crate) fn all() {
    is_refused_under(&[
        ("RANK", "1"),
        ("WORLD_SIZE", "3"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", "1234"),
    ]);
    is_refused_under(&[("OMPI_COMM_WORLD_RANK", "1"), ("OMPI_COMM_WORLD_SIZE", "3")]);

    is_refused("spawn", "a call in rank ");
    is_refused("spawn with arguments", "a call in rank ");
    is_refused("spawn by name", "the command that this process is a rank of");
    is_refused("spawn by a shell", "the command that this process is a rank of");

    // With other arguments each time it is another command.
    let [output] = end([program("spawn counted")]);
    let said = format!("{}{}", text(&output.stdout), text(&output.stderr));
    assert!(
        said.contains("at depth 4: spawn: got a call below 4 launchers; ") && !said.contains("too deep"),
        "{said}"
    );
    assert_eq!(output.status.code(), Some(1), "{said}");

    // Ranks that run another program end by themselves.
    let [output] = end([program("spawn another")]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(lines(&[output]), ["another"; 4]);
}
