//! Tests of `girandole process-groups`: its output when run directly, launched, and with ranks started by hand.

use std::process::{Output, Stdio};

use crate::common::{free_port, girandole, succeed, text};

/// Returns standard output without machine-dependent parts.
fn printed(output: &Output) -> String {
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    text(&output.stdout).replace(&format!("host {host},"), "host HOST,")
}

fn bare(arguments: &[&str]) -> String {
    printed(&succeed(girandole().arg("process-groups").args(arguments)))
}

/// Returns the lines below a heading.
fn part<'a>(printed: &'a str, heading: &str) -> Vec<&'a str> {
    let lines = printed.lines().skip_while(|line| *line != format!("===== {heading} =====")).skip(1);
    lines.take_while(|line| !line.is_empty()).collect()
}

#[test]
fn two_ranks_print_what_they_always_print() {
    let printed = bare(&["--transport", "tcp"]);
    let (back_ends, rest) = printed.split_once("\n\n").unwrap();
    assert_eq!(rest, include_str!("../../fixtures/process_groups_2.txt"));
    let lines: Vec<&str> = back_ends.lines().collect();
    let begins = [
        "===== back ends =====",
        "NCCL available: False (not compiled in; ",
        "TCP available: True (compiled in; ",
        "MPI available: False (not compiled in; ",
    ];
    assert_eq!(lines.len(), begins.len(), "{back_ends}");
    for (line, begin) in lines.iter().zip(begins) {
        assert!(line.starts_with(begin), "{line}");
        assert_eq!(line.contains("; missing: a build with "), line.contains("False"), "{line}");
    }
}

#[test]
fn the_order_of_a_groups_ranks_is_told() {
    let output = succeed(girandole().arg("process-groups"));
    let err = text(&output.stderr);
    let notes: Vec<&str> = err.lines().filter(|line| line.starts_with("note: ")).collect();
    assert!(
        notes.len() == 1 && notes[0].contains("torch.distributed.new_group sorts the list first"),
        "{err}"
    );
    let help = text(&succeed(girandole().args(["process-groups", "--help"])).stdout);
    let help = help.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(
        help.contains("in new_group([1, 0]) rank 1 has get_rank 0. PyTorch sorts the list first"),
        "{help}"
    );
}

#[test]
fn each_number_of_ranks_computes_what_the_formula_says() {
    for ranks in [1, 3, 5, 8] {
        let printed = bare(&["--world-size", &ranks.to_string()]);
        let own: Vec<[usize; 2]> = (1..=ranks).map(|number| [number, 10 * number]).collect();
        let sum = [own.iter().map(|own| own[0]).sum::<usize>(), own.iter().map(|own| own[1]).sum()];
        let every = |after: &dyn Fn(usize) -> String| -> Vec<String> {
            (0..ranks)
                .map(|rank| format!("rank {rank}: before {:?}, after {}", own[rank], after(rank)))
                .collect()
        };
        assert_eq!(part(&printed, "all_reduce (sum)"), every(&|_| format!("{sum:?}")));
        let root = |rank| if rank == 0 { sum } else { own[rank] };
        assert_eq!(part(&printed, "reduce (sum, to rank 0)"), every(&|rank| format!("{:?}", root(rank))));
        let last = format!("broadcast (from rank {})", ranks - 1);
        assert_eq!(part(&printed, &last), every(&|_| format!("{:?}", own[ranks - 1])));
        assert_eq!(part(&printed, "all_gather"), every(&|_| format!("{:?}", own.concat())));

        let some: Vec<usize> = (0..ranks.max(2) - 1).collect();
        let members = part(&printed, &format!("new_group({some:?})"));
        for (rank, line) in members.iter().enumerate() {
            let sum: usize = some.iter().sum();
            let inside = format!(
                "in the group True, get_rank {rank}, get_world_size {}, get_process_group_ranks {some:?}, \
                                  all_reduce of the rank [{sum}]",
                some.len()
            );
            let expected = if some.contains(&rank) { inside } else { "in the group False".into() };
            assert_eq!(*line, format!("rank {rank}: {expected}"));
        }
        let reversed: Vec<usize> = (0..ranks).rev().collect();
        for (rank, line) in part(&printed, &format!("new_group({reversed:?})")).iter().enumerate() {
            assert!(
                line.contains(&format!("get_rank {}, get_world_size {ranks},", ranks - 1 - rank)),
                "{line}"
            );
        }
        assert_eq!(part(&printed, &format!("closing the group of {reversed:?}")).len(), 2 * ranks);
    }
}

#[test]
fn each_rank_sends_to_the_next_one() {
    let printed = bare(&["--world-size", "3"]);
    assert_eq!(
        part(&printed, "send, recv"),
        [
            "rank 0: before [1, 10], sent to rank 1; after [3, 30], received from rank 2",
            "rank 1: before [2, 20], sent to rank 2; after [1, 10], received from rank 0",
            "rank 2: before [3, 30], sent to rank 0; after [2, 20], received from rank 1",
        ]
    );
}

#[test]
fn ranks_are_counted_node_by_node() {
    let printed = bare(&["--world-size", "1", "--nodes", "3", "--nproc-per-node", "2"]);
    let lines = part(&printed, "3 nodes with 2 ranks each: global rank = node x 2 + local rank");
    let expected =
        (0..6).map(|rank| format!("node {}, local rank {}: global rank {rank}", rank / 2, rank % 2));
    assert_eq!(lines, expected.collect::<Vec<_>>());
}

#[test]
fn the_transport_is_the_one_that_is_asked_for() {
    for (transport, expected) in [("tcp", "over TCP with [1]"), ("shm", "through shared memory with [1]")] {
        let mut command = girandole();
        // The option takes precedence over the variable.
        let other = if transport == "tcp" { "shm" } else { "tcp" };
        command.env("GIRANDOLE_TRANSPORT", other).args(["process-groups", "--transport", transport]);
        let printed = printed(&succeed(&mut command));
        assert!(printed.contains(&format!("rank 0: host HOST, data {expected}\n")), "{printed}");
    }
    let mut launched = girandole();
    launched.args(["launch", "--nproc-per-node", "2", "--transport", "shm", "girandole", "process-groups"]);
    assert!(text(&succeed(&mut launched).stdout).contains("through shared memory with [1]"));
}

#[test]
fn launched_it_prints_the_same() {
    let launched =
        succeed(girandole().args(["launch", "--nproc-per-node", "3", "girandole", "process-groups"]));
    assert_eq!(printed(&launched), bare(&["--world-size", "3"]));
    assert_eq!(text(&launched.stderr), "");
}

#[test]
fn ranks_meet_where_they_are_told() {
    let folder = tempfile::tempdir().unwrap();
    let port = free_port();
    let file = format!("file://{}", folder.path().join("meeting").display());
    for method in [format!("tcp://127.0.0.1:{port}"), file] {
        let rank = |rank: &str| {
            // Without MASTER_ADDR and MASTER_PORT.
            let mut command = girandole();
            command.env("RANK", rank).env("WORLD_SIZE", "2").stdout(Stdio::piped()).stderr(Stdio::piped());
            command.args(["process-groups", "--init-method", &method]);
            command
        };
        let second = rank("1").spawn().unwrap();
        let first = printed(&succeed(&mut rank("0")));
        let second = second.wait_with_output().unwrap();
        assert!(second.status.success(), "{}", text(&second.stderr));
        assert_eq!(text(&second.stdout), "");
        let kind = method.split_inclusive("//").next().unwrap();
        let lines = part(&first, "meeting places");
        assert_eq!(lines[0], format!("{kind}: 2 of 2 ranks have met; this is the world group"));
        assert_eq!(lines.len(), 2, "the others are not shown");
    }
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn nothing_is_left_in_the_folder_for_temporary_files() {
    let folder = tempfile::tempdir().unwrap();
    succeed(girandole().arg("process-groups").env("TMPDIR", folder.path()));
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn wrong_input_is_told() {
    for (arguments, part) in [
        (&["--world-size", "0"][..], "give a whole number, 1 or more"),
        (&["--world-size", "5000"], "--world-size: got 5000"),
        (&["--nodes", "0"], "give a whole number, 1 or more"),
        (
            &["--nodes", "1000000"],
            "--nodes: got 1000000; with --nproc-per-node 4 give a table of 4096 ranks at most",
        ),
        (&["--backend", "mpi"], "error: --backend mpi is not available: this build does not include MPI"),
        (&["--backend", "nccl"], "error: --backend nccl is not available: this build does not include NCCL"),
        (&["--init-method", "http://x"], "http://x"),
        (&["--timeout", "0"], "greater than 0"),
        (&["--transport", "rdma"], "'rdma'"),
    ] {
        let output = girandole().arg("process-groups").args(arguments).output().unwrap();
        let line = text(&output.stderr);
        assert_eq!(
            (output.status.code(), text(&output.stdout).as_str()),
            (Some(2), ""),
            "{arguments:?}: {line}"
        );
        assert!(line.starts_with("error: ") && line.contains(part), "{arguments:?}: {line}");
    }
}
