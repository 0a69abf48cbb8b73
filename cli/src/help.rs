//! The two help pages of a command: `-h` fits one page (the command's own options, and only the names of shared
//! ones); `--help` describes everything.

use std::fmt::Write;

use clap::{Arg, Command};

/// Line width of all help. clap does not wrap: that would need another crate, which asks the terminal for its size.
pub const WIDTH: usize = 100;
/// Line width of a narrow terminal, which wraps longer lines of `-h`.
pub const NARROW: usize = 80;
/// Indentation that clap puts before the text of an option in `--help`.
const INDENT: usize = 10;

/// Options shared by many commands, by help heading. `-h` has one line for each group that a command has.
pub const SHARED: [(&str, &[&str]); 9] = [
    (
        "Ranks",
        &[
            "backend", "transport", "tls", "init-method", "timeout", "grace", "device", "elastic", "replace",
            "pipeline-schedule",
        ],
    ),
    (
        "Training",
        &[
            "task", "labels", "center-rewards", "sequence-parallel", "balance", "balance-coefficient",
            "no-shuffle", "packing", "too-long", "field", "chat-template", "precision", "check-gradient",
            "no-memory-check", "dropout", "parameters", "recompute",
        ],
    ),
    (
        "Optimizer",
        &[
            "optimizer", "schedule", "warmup", "lowest-lr", "betas", "eps", "weight-decay", "momentum",
            "nesterov", "adjust-lr", "adamw-lr", "far-every", "far-lr", "far-momentum", "far-bits",
            "far-fragments", "far-delay", "clip",
        ],
    ),
    ("Evaluation and logging", &["evaluate-every", "evaluate-rows", "sample-prompt", "sample", "log-every"]),
    ("Preferences", &["label-smoothing", "simpo-gamma", "reference"]),
    (
        "Adapters",
        &[
            "lora-alpha", "lora-targets", "lora-dropout", "lora-rslora", "lora-dora", "lora-rank-pattern",
            "lora-alpha-pattern", "lora-save-modules", "merge",
        ],
    ),
    (
        "Language models",
        &[
            "document-length", "pipeline-schedule", "labels", "reference", "lora-targets",
            "lora-rank-pattern", "lora-dora", "lora-save-modules", "base-bits", "accumulate", "parameters",
        ],
    ),
    ("Files", &["init", "data", "save", "save-dtype", "metrics", "trace", "report", "tensorboard"]),
    ("Checkpoints", &["checkpoint-dir", "checkpoint-every", "resume", "stop-on"]),
];

/// Prepares both help pages of a command. In `-h`, the options are followed by the shared options' names and the
/// examples; in `--help`, by the command's whole text.
pub(crate) fn with_pages(command: Command) -> Command {
    let groups = SHARED.map(|(heading, _)| (heading, shared(&command, heading)));
    let styles = command.get_styles().clone();
    let (header, literal) = (styles.get_header(), styles.get_literal());
    let mut page = String::new();
    if groups.iter().any(|(_, options)| !options.is_empty()) {
        let _ = writeln!(page, "{header}Shared options{header:#} (described by {literal}--help{literal:#}):");
    }
    for (heading, options) in groups.iter().filter(|(_, options)| !options.is_empty()) {
        let _ = writeln!(
            page,
            "  {}",
            wrap(&format!("{heading}: {}", options.join(", ")), NARROW - 4).replace('\n', "\n    ")
        );
    }
    let text = command.get_after_help().map(ToString::to_string).unwrap_or_default();
    let examples: Vec<&str> = text.lines().filter(|line| line.starts_with("  girandole ")).collect();
    if !examples.is_empty() {
        let _ = writeln!(page, "\n{header}Examples:{header:#}\n{}", examples.join("\n"));
    }
    let fold = |option: Arg| {
        let is_shared = is_shared(&option);
        let text = option.get_long_help().or(option.get_help()).map(ToString::to_string);
        let option = option.hide_short_help(is_shared);
        match text {
            Some(text) => option.long_help(wrap(&text, WIDTH - INDENT)),
            None => option,
        }
    };
    let command = command.mut_args(fold).after_help(page.trim().to_owned());
    if text.is_empty() { command } else { command.after_long_help(wrap(&text, WIDTH)) }
}

/// Prepares a command for `-h`: an option's possible values are omitted if its line would be too long. `--help` lists
/// them.
pub fn short(command: Command) -> Command {
    let listed =
        command.get_arguments().filter(|option| !option.is_hide_set() && !option.is_hide_short_help_set());
    let listed: Vec<Arg> = listed.cloned().collect();
    command.mut_args(|option| {
        let values = option.get_possible_values();
        if values.is_empty() || !option.get_action().takes_values() {
            return option;
        }
        // Options under one heading start their texts in the same column.
        let is_beside = |other: &&Arg| {
            (other.get_help_heading(), other.is_positional())
                == (option.get_help_heading(), option.is_positional())
        };
        let column = listed.iter().filter(is_beside).map(name_width).max().unwrap_or(0);
        let values =
            values.iter().filter(|value| !value.is_hide_set()).map(|value| value.get_name().len() + 2);
        let defaults = option.get_default_values().iter().map(|value| value.len() + " [default: ]".len());
        let text = option.get_help().map_or(0, |help| help.to_string().chars().count());
        let len =
            column + text + " [possible values: ".len() + values.sum::<usize>() + defaults.sum::<usize>();
        let is_hidden = option.is_hide_possible_values_set() || len > WIDTH;
        option.hide_possible_values(is_hidden)
    })
}

/// Returns the number of columns before the text of an option in `-h`, if no other option under its heading needs more.
fn name_width(option: &Arg) -> usize {
    let value = option.get_value_names().and_then(|names| names.first()).map_or(0, |name| name.len() + 2);
    let value = if option.get_action().takes_values() { value } else { 0 };
    match option.get_long() {
        None => 4 + value,
        // After the space for a short option, `-h, `.
        Some(long) => 10 + long.len() + if value > 0 { 1 + value } else { 0 },
    }
}

/// Returns the options of a shared group that a command has, with `--`.
fn shared(command: &Command, heading: &str) -> Vec<String> {
    let options = command.get_arguments().filter(|option| option.get_help_heading() == Some(heading));
    let names = options.filter(|option| is_shared(option) && !option.is_hide_set()).filter_map(Arg::get_long);
    names.map(|name| format!("--{name}")).collect()
}

fn is_shared(option: &Arg) -> bool {
    let group = SHARED.iter().find(|(heading, _)| option.get_help_heading() == Some(heading));
    group.is_some_and(|(_, names)| option.get_long().is_some_and(|name| names.contains(&name)))
}

/// Wraps the paragraphs of a text at `width` columns. Lines that begin with a space are kept unchanged.
fn wrap(text: &str, width: usize) -> String {
    let mut lines: Vec<String> = Vec::new();
    let mut joins = false;
    for line in text.lines() {
        let is_prose = !line.is_empty() && !line.starts_with(' ');
        if !(is_prose && joins) {
            lines.push(if is_prose { String::new() } else { line.to_owned() });
        }
        joins = is_prose;
        for word in line.split_whitespace().filter(|_| is_prose) {
            match lines.last_mut() {
                Some(last) if last.is_empty() => last.push_str(word),
                Some(last) if last.chars().count() + 1 + word.chars().count() <= width => {
                    last.push(' ');
                    last.push_str(word);
                }
                _ => lines.push(word.to_owned()),
            }
        }
    }
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paragraphs_are_wrapped_and_examples_are_not() {
        let text = "one\ntwo three\n\nfour\n\n  an example that is long\n  example 2\nfive";
        let wrapped = "one two\nthree\n\nfour\n\n  an example that is long\n  example 2\nfive";
        assert_eq!(wrap(text, 8), wrapped);
        assert_eq!(wrap("averylongword b", 4), "averylongword\nb");
    }
}
