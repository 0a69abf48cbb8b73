//! Parsing of criterion's arguments: which benchmarks are selected.

/// Criterion's long options that take a value, which may be the next argument.
const WITH_VALUE: [&str; 17] = [
    "--color", "--colour", "--save-baseline", "--baseline", "--baseline-lenient", "--load-baseline",
    "--format", "--output-format", "--plotting-backend", "--profile-time", "--sample-size", "--warm-up-time",
    "--measurement-time", "--nresamples", "--noise-threshold", "--confidence-level", "--significance-level",
];
/// Criterion's short options that take a value.
const LETTERS_WITH_VALUE: &str = "csb";
/// Options with which no benchmark runs, whatever the filter.
const NOTHING_RUNS: [&str; 3] = ["--list", "--ignored", "--load-baseline"];

/// Returns the filter in the arguments of a criterion program; `None` if there is none, or if no benchmarks are to run.
///
/// ```
/// let arguments = ["--bench", "--save-baseline", "before", "ddp/2 ranks"].map(String::from);
/// assert_eq!(benches::filter(&arguments), Some("ddp/2 ranks"));
/// assert_eq!(benches::filter(&arguments[..3]), None);
/// ```
#[must_use]
pub fn filter(arguments: &[String]) -> Option<&str> {
    let mut filter = None;
    let mut rest = arguments.iter().map(String::as_str);
    while let Some(argument) = rest.next() {
        let name = argument.split_once('=').map_or(argument, |(name, _)| name);
        if NOTHING_RUNS.contains(&name) {
            return None;
        }
        if argument == "--" {
            filter = filter.or(rest.next());
        } else if value_follows(argument) {
            rest.next();
        } else if !argument.starts_with('-') || argument == "-" {
            filter = filter.or(Some(argument));
        }
    }
    filter
}

/// Whether the next argument is this option's value.
fn value_follows(argument: &str) -> bool {
    if argument.starts_with("--") {
        return WITH_VALUE.contains(&argument);
    }
    // Short options may be combined; the first one with a value takes the rest of the argument.
    let letters = argument.strip_prefix('-').unwrap_or_default();
    letters.find(|letter| LETTERS_WITH_VALUE.contains(letter)).is_some_and(|place| place + 1 == letters.len())
}

#[cfg(test)]
mod tests {
    use super::filter;

    fn of(line: &str) -> Option<String> {
        let arguments: Vec<String> = line.split(' ').map(String::from).collect();
        filter(&arguments).map(String::from)
    }

    #[test]
    fn values_of_options_are_no_filter() {
        for line in [
            "--bench",
            "--bench --save-baseline before",
            "--bench --save-baseline=before",
            "-b before --color never",
            "-bbefore -vn",
            "-vs before --sample-size 10 --exact",
            "--baseline before --noise-threshold 0.1 --test",
        ] {
            assert_eq!(of(line), None, "{line}");
        }
    }

    #[test]
    fn the_filter_is_found_at_every_place() {
        for line in [
            "--bench ddp", "ddp --bench --test", "--save-baseline before ddp --exact", "-b before ddp",
            "-bbefore ddp", "-n ddp --color=never", "--bench -- ddp",
        ] {
            assert_eq!(of(line).as_deref(), Some("ddp"), "{line}");
        }
    }

    #[test]
    fn where_no_bench_is_to_run_none_is_missed() {
        for line in
            ["ddp --list", "--list --format terse ddp", "--ignored ddp", "--baseline a --load-baseline b ddp"]
        {
            assert_eq!(of(line), None, "{line}");
        }
    }
}
