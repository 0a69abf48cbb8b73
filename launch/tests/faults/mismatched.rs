//! Ranks that do not make the same calls.

use crate::ending::Ending;
use crate::group::{Group, Setup, in_parallel};

/// What most ranks call, and what the odd one calls; the first call of each is the one that differs.
const PAIRS: [(&str, &str); 16] = [
    ("all_reduce f32 100 sum", "all_reduce f32 101 sum"),
    ("all_reduce f32 3000000 sum", "all_reduce f32 3000001 sum"),
    ("all_reduce f32 100 sum", "all_reduce f32 3000000 sum"),
    ("all_reduce f32 100 sum", "all_reduce f32 0 sum"),
    ("all_reduce f32 100 sum", "all_reduce u32 100 sum"),
    ("all_reduce f16 100 sum", "all_reduce bf16 100 sum"),
    ("all_reduce f32 100 sum", "all_reduce f32 100 max"),
    ("broadcast f32 100 0", "broadcast f32 100 1"),
    ("broadcast f32 100 1", "broadcast f64 100 1"),
    ("broadcast f32 3000000 0", "broadcast f32 3000001 0"),
    ("reduce f32 100 sum 0", "reduce f32 100 sum 1"),
    ("all_gather f32 100", "all_gather f32 99"),
    ("reduce_scatter f32 100 sum", "reduce_scatter f32 99 sum"),
    ("reduce f32 100 sum 0", "broadcast f32 100 0"),
    ("barrier", "all_reduce f32 1 sum"),
    ("all_reduce f32 8 sum; barrier", "barrier; all_reduce f32 8 sum"),
];

/// Returns a call as it appears in error messages.
fn written(call: &str) -> String {
    let words: Vec<&str> = call.split(' ').collect();
    match words[..] {
        ["barrier"] => "barrier #1".into(),
        [name, dtype, len] => format!("{name} #1 ({dtype}, {len} elements)"),
        ["broadcast", dtype, len, root] => format!("broadcast #1 (root {root}, {dtype}, {len} elements)"),
        [name, dtype, len, op] => format!("{name} #1 ({op}, {dtype}, {len} elements)"),
        [name, dtype, len, op, root] => format!("{name} #1 (root {root}, {op}, {dtype}, {len} elements)"),
        _ => panic!("no call: {call}"),
    }
}

/// Asserts that all ranks report the same error, which names these two calls.
fn assert_mismatch(endings: &[Ending], odd: usize, odd_call: &str, call: &str) {
    let text = endings[0].assert_failed("Mismatch", odd);
    let expected = format!("rank {odd} called {odd_call}, rank ");
    assert!(
        text.contains(&expected) && text.contains(&format!(" called {call};")),
        "{text}\n{expected}\n{call}"
    );
    endings.iter().for_each(|ending| assert_eq!(ending.assert_failed("Mismatch", odd), text));
}

fn differ(world_size: usize, odd: usize, usual: &str, other: &str) {
    // The following barrier also fails ranks that received nothing in the first call.
    let script = |rank| format!("{}; barrier", if rank == odd { other } else { usual });
    let scripts: Vec<String> = (0..world_size).map(script).collect();
    let endings = Group::start(&scripts, &Setup::default()).finish_all();
    let first = |script: &str| written(script.split("; ").next().unwrap());
    // With two ranks there is no odd one: the higher is named first.
    let (named, named_call, call) = match (world_size, odd) {
        (2, 0) => (1, first(usual), first(other)),
        _ => (odd, first(other), first(usual)),
    };
    assert_mismatch(&endings, named, &named_call, &call);
}

fn differ_everywhere(world_size: usize) {
    let ranks = 0..world_size;
    let cases: Vec<_> = ranks.flat_map(|odd| PAIRS.map(|(usual, other)| (odd, usual, other))).collect();
    in_parallel(2, &cases, |(odd, usual, other)| differ(world_size, *odd, usual, other));
}

#[test]
fn two_ranks() {
    differ_everywhere(2);
}

#[test]
fn one_of_three() {
    differ_everywhere(3);
}

/// In these calls some ranks exchange nothing with the odd one.
#[test]
fn one_of_four() {
    let pairs = [
        ("broadcast f32 100 0", "barrier"),
        ("broadcast f32 100 2", "barrier"),
        ("barrier", "broadcast f32 100 0"),
        ("barrier", "broadcast f32 100 3"),
        ("reduce f32 100 sum 0", "all_gather f32 100"),
        ("all_reduce f32 100 sum", "broadcast f32 100 1"),
        ("all_reduce f32 100 sum", "all_reduce f32 3000000 sum"),
        ("reduce f32 100 sum 1", "broadcast f32 100 1"),
    ];
    let cases: Vec<_> = (0..4).flat_map(|odd| pairs.map(|(usual, other)| (odd, usual, other))).collect();
    in_parallel(2, &cases, |(odd, usual, other)| differ(4, *odd, usual, other));
}

/// Two and two: no majority, but one error.
#[test]
fn half_of_four() {
    let scripts = ["broadcast f32 10 0", "barrier", "broadcast f32 10 0", "barrier"]
        .map(|call| format!("{call}; barrier"));
    let endings = Group::start(&scripts, &Setup::default()).finish_all();
    let text = &endings[0].failure.as_ref().unwrap().text;
    assert!(
        text.contains("broadcast #1 (root 0, f32, 10 elements)") && text.contains("barrier #1"),
        "{text}"
    );
    endings.iter().for_each(|ending| assert_eq!(&ending.failure.as_ref().unwrap().text, text));
}

/// A message and another call: the sender's next call reveals the mismatch, too.
#[test]
fn messages() {
    let cases = [
        ("send f32 10 1", "recv f32 11 0", "message #1 (from rank 0, f32, 11 elements)"),
        ("send f32 3000000 1", "recv f32 2999999 0", "message #1 (from rank 0, f32, 2999999 elements)"),
        ("send f32 10 1", "recv f16 10 0", "message #1 (from rank 0, f16, 10 elements)"),
        ("send f32 10 1", "all_reduce f32 10 sum", "all_reduce #1 (sum, f32, 10 elements)"),
        ("send f32 3000000 1", "barrier", "barrier #1"),
        ("recv f32 10 1", "all_reduce f32 10 sum", "all_reduce #1 (sum, f32, 10 elements)"),
        ("recv f32 10 1", "all_reduce f32 3000000 sum", "all_reduce #1 (sum, f32, 3000000 elements)"),
    ];
    in_parallel(2, &cases, |(first, second, call)| {
        for third in [None, Some("await; barrier")] {
            let mut scripts = vec![format!("{first}; barrier"), format!("{second}; barrier")];
            scripts.extend(third.map(String::from));
            let mut group = Group::start(&scripts, &Setup::default());
            let mut endings = vec![group.finish(0), group.finish(1)];
            if third.is_some() {
                group.tell(2);
                endings.push(group.finish(2));
            }
            let from = if first.starts_with("send") { 0 } else { 1 };
            let len = first.split(' ').nth(2).unwrap();
            let message = format!("message #1 (from rank {from}, f32, {len} elements)");
            // A small message is sent at once, and its sender may be in the next call, which differs as well.
            let next = endings[0].failure.as_ref().unwrap().text.contains("rank 0 called barrier #1");
            assert_mismatch(&endings, 1, call, if next { "barrier #1" } else { &message });
        }
    });
}
