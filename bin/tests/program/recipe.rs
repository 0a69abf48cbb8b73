//! `--recipe`: options from a file, overridden by the command line, on every rank; and errors in recipes.

use std::fs;

use crate::common::{Folder, Girandole, losses, text};

const PRETRAIN: Girandole = Girandole("pretrain");
const FINETUNE: Girandole = Girandole("finetune");

/// Returns a folder with texts, and the options of a small run as a recipe.
fn folder() -> (Folder, String) {
    let folder = Folder::new();
    fs::write(folder.path("a.txt"), "one two three four\n".repeat(200)).unwrap();
    fs::write(folder.path("b.txt"), "five six seven eight\n".repeat(200)).unwrap();
    let recipe = format!(
        "# A run.\ndata = [\"{}\", '{}']\nout = \"{}\"\nlayers = 2\nhidden = 32\nheads = 4\nlength = 16\nbatch-size = 8\nlr = 1e-2\nsteps = 4\nbetas = [0.9, 0.9]\n",
        folder.argument("a.txt"),
        folder.argument("b.txt"),
        folder.argument("out"),
    );
    (folder, recipe)
}

fn write(folder: &Folder, recipe: &str) -> String {
    fs::write(folder.path("run.toml"), recipe).unwrap();
    folder.argument("run.toml")
}

#[test]
fn a_recipe_is_as_if_it_were_typed_and_the_command_line_wins() {
    let (folder, recipe) = folder();
    let (a, b, out) = (folder.argument("a.txt"), folder.argument("b.txt"), folder.argument("out"));
    let losses_of = |arguments: &[&str]| {
        let metrics = folder.argument("metrics.jsonl");
        let output = PRETRAIN.succeed(&[arguments, &["--metrics", &metrics, "--overwrite"]].concat());
        assert_eq!(text(&output.stderr), "", "{arguments:?}");
        losses(&folder.path("metrics.jsonl"))
    };
    let typed = |steps, no_shuffle: &[&str]| {
        let options = [
            "--data", &a, &b, "--out", &out, "--layers", "2", "--hidden", "32", "--heads", "4", "--length",
            "16", "--batch-size", "8", "--lr", "0.01", "--betas", "0.9,0.9", "--steps", steps,
        ];
        losses_of(&[&options[..], no_shuffle].concat())
    };
    let path = write(&folder, &recipe);
    assert_eq!(losses_of(&["--recipe", &path]), typed("4", &[]));
    let path = write(&folder, &format!("{recipe}no_shuffle = true\nworld-size = 2\n"));
    let recipe = format!("--recipe={path}");
    // Underscores are accepted as everywhere; ranks get the same options.
    assert_eq!(losses_of(&["--batch_size", "4", &recipe, "--steps", "3", "--world-size=1"]).len(), 3);
    assert_eq!(losses_of(&[&recipe, "--no-shuffle=false", "--world-size=1"]), typed("4", &[]));
}

#[test]
fn ranks_have_the_recipe_as_it_was_when_they_were_started() {
    let (folder, recipe) = folder();
    let path = write(&folder, &format!("{recipe}mesh = 'shard=2'\n"));
    let output = PRETRAIN.succeed(&["--recipe", &path, "--report", &folder.argument("page.html")]);
    assert!(text(&output.stdout).contains("layout: shard=2"), "{}", text(&output.stdout));
    // The report shows the command as it was typed.
    let page = fs::read_to_string(folder.path("page.html")).unwrap();
    assert!(page.contains("pretrain --recipe "), "{page}");
    let evaluated = Girandole("evaluate").succeed(&[
        "--recipe",
        &write(&folder, &format!("data = '{}'", folder.argument("a.txt"))),
        "--model",
        &folder.argument("out"),
    ]);
    assert!(text(&evaluated.stdout).starts_with("tokens: "));
}

#[test]
fn what_is_wrong_in_a_recipe_names_it() {
    let (folder, recipe) = folder();
    let refuse = |end: &str, says: &str| {
        let path = write(&folder, &format!("{recipe}{end}"));
        let line = PRETRAIN.refuse(&["--recipe", &path]);
        assert_eq!(line.lines().count(), 1, "{line}");
        let begin = format!("error: {path}: line ");
        assert!(line.starts_with(&begin) && line.contains(says), "{end}: {line}");
    };
    refuse("wamup = 3\n", "pretrain has no option \"wamup\"; the nearest is warmup");
    refuse("lora-rank = 4\n", "pretrain has no option \"lora-rank\"");
    refuse("seed = 'x'\n", "seed is a string; expected a whole number");
    refuse("seed = -1\n", "invalid value '-1' for '--seed <N>': give a whole number from 0 to");
    refuse(
        "schedule = 'cosin'\n",
        "invalid value 'cosin' for '--schedule <SCHEDULE>' [possible values: constant, cosine,",
    );
    refuse("steps = 5\n", "this is not TOML: duplicate key");
    refuse("batch_size = 5\n", "batch-size is in line 8 already");
    refuse("recipe = 'other.toml'\n", "a recipe cannot name another one");
    refuse("this is no TOML", "this is not TOML: ");
    refuse("model = 'x'\n", "cannot be used with");
    refuse("mesh = 'dp=3'\n", "line 8: --batch-size: got 8; give a multiple of 3");
    let missing = PRETRAIN.refuse(&["--recipe", &folder.argument("none.toml")]);
    assert!(missing.starts_with("error: cannot read ") && missing.contains("none.toml: "), "{missing}");
    assert!(PRETRAIN.refuse(&["--recipe", &folder.argument(".")]).contains("it is a folder"));
    // Errors in options that were typed do not name the recipe.
    let path = write(&folder, &recipe);
    let line = PRETRAIN.refuse(&["--recipe", &path, "--steps", "0"]);
    assert!(line.starts_with("error: invalid value '0' for '--steps <N>'"), "{line}");
    let line = PRETRAIN.refuse(&["--recipe", &path, "--batch-size", "7", "--world-size", "2"]);
    assert!(line.starts_with("error: --batch-size: got 7"), "{line}");
    assert!(FINETUNE.refuse(&["--recipe", &path]).contains("finetune has no option \"layers\""));
    PRETRAIN.refuse(&["--recipe", &path, "--recipe", &path]);
    assert!(!folder.path("out/config.json").exists());
}
