//! Tests of the help of all commands.

use bin::commands;
use clap::{Arg, Command};
use cli::help::{NARROW, SHARED, WIDTH, short};

/// Every command except clap's own `help`, and the program itself.
fn all() -> Vec<Command> {
    built(commands())
}

fn built(mut program: Command) -> Vec<Command> {
    program.build();
    let subcommands = program.get_subcommands().filter(|command| command.get_name() != "help");
    let mut all: Vec<Command> = subcommands.cloned().collect();
    all.push(program);
    assert!(all.len() > 20, "{} commands", all.len());
    all
}

/// Returns the lines that are longer than the help's width.
fn too_long(page: &str) -> Vec<&str> {
    page.lines().filter(|line| line.chars().count() > WIDTH).collect()
}

/// Returns the number of lines that a page takes on a terminal of `width` columns.
fn lines(page: &str, width: usize) -> usize {
    page.lines().map(|line| line.chars().count().div_ceil(width).max(1)).sum()
}

#[test]
fn the_short_help_is_a_page() {
    let mut long = Vec::new();
    for mut command in built(commands().mut_subcommands(short)) {
        let page = command.render_help().to_string();
        for width in [NARROW, WIDTH] {
            let (name, lines) = (command.get_name(), lines(&page, width));
            assert!(lines < 60, "{name} -h has {lines} lines of {width} columns:\n{page}");
        }
        let is_list = |line: &&&str| line.contains("[default: all_reduce,");
        long.extend(too_long(&page).iter().filter(|line| !is_list(line)).map(ToString::to_string));
    }
    assert_eq!(long, [""; 0]);
}

#[test]
fn the_short_help_leaves_out_values_only_where_a_line_is_long() {
    let page = |name: &str| {
        let mut program = commands();
        short(program.find_subcommand_mut(name).unwrap().clone()).render_help().to_string()
    };
    let (plan, sampler) = (page("plan"), page("sampler"));
    assert!(plan.contains("[MODEL]") && !plan.contains("ddp-mlp,"), "{plan}");
    assert!(sampler.contains("--tail <") && !sampler.contains("drop, uneven"), "{sampler}");
    for (name, values) in
        [("ddp-trainer", "mse, document"), ("completions", "bash, elvish, fish, powershell, zsh")]
    {
        assert!(page(name).contains(&format!("[possible values: {values}]")), "{}", page(name));
    }
}

#[test]
fn the_long_help_fits_the_width() {
    let pages: Vec<String> = all().iter_mut().map(|command| command.render_long_help().to_string()).collect();
    let long: Vec<&str> = pages.iter().flat_map(|page| too_long(page)).collect();
    assert_eq!(long, [""; 0]);
}

#[test]
fn both_helps_name_every_option() {
    for mut command in all() {
        let (short, long) = (command.render_help().to_string(), command.render_long_help().to_string());
        let listed = command.get_arguments().filter(|option| !option.is_hide_set());
        let names: Vec<String> = listed.filter_map(Arg::get_long).map(|name| format!("--{name}")).collect();
        for name in names {
            let has = |help: &str| {
                help.split(|c: char| !(c.is_ascii_alphanumeric() || c == '-')).any(|word| word == name)
            };
            assert!(has(&long), "{} --help has no {name}", command.get_name());
            assert!(has(&short), "{} -h has no {name}", command.get_name());
        }
    }
}

#[test]
fn shared_options_are_described_by_the_long_help_only() {
    let mut program = commands();
    let pretrain = program.find_subcommand_mut("pretrain").unwrap();
    let (short, long) = (pretrain.render_help().to_string(), pretrain.render_long_help().to_string());
    assert!(
        short.contains("\n  Checkpoints: --checkpoint-dir, --checkpoint-every, --resume, --stop-on\n"),
        "{short}"
    );
    assert!(!short.contains("--resume [<CHECKPOINT>]") && long.contains("--resume [<CHECKPOINT>]"));
    assert!(short.contains("--mesh <AXES>"), "{short}");
    assert!(short.contains("\n  girandole pretrain --data"), "{short}");
}

#[test]
fn every_shared_option_is_one_of_a_command() {
    let all = all();
    for (heading, names) in SHARED {
        for name in names {
            let is_it =
                |option: &Arg| option.get_long() == Some(name) && option.get_help_heading() == Some(heading);
            let found = all.iter().any(|command| command.get_arguments().any(is_it));
            assert!(found, "no command has --{name} under {heading}");
        }
    }
}
