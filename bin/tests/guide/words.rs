//! Tests that texts contain none of a list of hard-to-read phrases.

use crate::common::{girandole, succeed, text};
use crate::messages::SOURCES;
use crate::pages::{all, page, root};
use crate::texts::{rust_files, texts};

/// Phrases, each with a clearer replacement.
const RIDDLES: [(&str, &str); 36] = [
    ("times are yours", "timings vary by machine"),
    ("what is missing is one line", "a missing library is reported in one line"),
    ("cannot be gone on from", "unusable"),
    ("can be gone on from", "usable"),
    ("is no mistake of", "is not an error"),
    ("is all there is to", "is all that you need"),
    ("nothing has to be said", "no options are needed"),
    ("there are not, and why", "impossible ways, with the reason"),
    ("as they are called", "the usual ones"),
    ("works so,", "works this way"),
    ("without a word", "silently"),
    ("underscores do as well", "underscores may be used as well"),
    ("but for the order", "except for the order"),
    ("is made tokens of", "is tokenized"),
    ("what is typed wins", "the command line overrides it"),
    ("dealt out anew", "distributed again"),
    ("begin anew", "start again"),
    ("formed anew", "formed again"),
    ("as any others", "like any others"),
    ("what the environment says", "from the environment"),
    ("where tensors are", "device of tensors"),
    ("how ranks talk", "backend of communication"),
    ("how it falls", "how the learning rate falls"),
    ("what it falls to", "learning rate at the end"),
    ("steps over which it grows", "steps in which the learning rate grows"),
    ("who does what when, and end", "which rank does what when, without training"),
    ("numbers that a token becomes", "features of a token"),
    ("tokens that there are", "tokens in the vocabulary"),
    ("optimizer remembers", "state of the optimizer"),
    ("says how much it has to do", "prints its number of steps"),
    ("a program of one's own", "your own program"),
    ("that are there", "that exist"),
    ("where there are no epochs", "without epochs"),
    ("is none itself", "is not one itself"),
    ("an order of its own", "a new order"),
    ("whoever has", "the rank, or process, that has"),
];

/// Fails if a text contains one of them.
fn check(name: &str, text: &str) {
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ").to_lowercase();
    for (riddle, plain) in RIDDLES {
        assert!(!text.contains(riddle), "{name}: in place of `{riddle}`, say `{plain}`");
    }
}

#[test]
fn there_are_no_riddles() {
    for page in all().into_iter().chain([page("CHANGELOG.md")]) {
        check(&page.name(), &page.text);
    }
}

#[test]
fn there_are_none_in_the_help() {
    let help = |arguments: &[&str]| text(&succeed(girandole().args(arguments)).stdout);
    let program = help(&["-h"]);
    let commands = program.lines().skip_while(|line| *line != "Commands:").skip(1);
    let names = commands.map_while(|line| line.split_whitespace().next()).filter(|name| *name != "help");
    let mut seen = 0;
    for name in names {
        check(&format!("girandole {name} --help"), &help(&[name, "--help"]));
        seen += 1;
    }
    assert!(seen > 20, "{seen} commands: {program}");
}

/// Checks the string literals of programs and libraries: errors, warnings, notes and all others.
#[test]
fn there_are_none_in_messages() {
    let mut seen = 0;
    for folder in SOURCES {
        for code in rust_files(&root().join(folder)) {
            // Unit tests print nothing to users.
            let code = code.split("#[cfg(test)]").next().unwrap_or_default();
            for text in texts(code) {
                check(folder, &text);
                seen += 1;
            }
        }
    }
    assert!(seen > 3000, "{seen} texts");
}
