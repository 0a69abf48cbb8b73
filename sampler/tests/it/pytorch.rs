//! Results of PyTorch, to the bit; the fixtures state how they were made.

use sampler::{
    DistributedSampler, DistributedSamplerConfig, Generator, RandomSampler, Sampler, SharedGenerator, Tail,
    initial,
};
use serde::Deserialize;

#[derive(Deserialize)]
struct Cases<T> {
    cases: Vec<T>,
}

#[derive(Deserialize)]
struct RandomCase {
    seed: u64,
    calls: Vec<Call>,
}

#[derive(Debug, Deserialize)]
struct Call {
    op: String,
    args: Vec<f64>,
    out: Vec<f64>,
}

#[derive(Deserialize)]
struct InitialCase {
    seed: u64,
    layers: Vec<Layer>,
}

#[derive(Debug, Deserialize)]
struct Layer {
    layer: String,
    args: Vec<usize>,
    weight: Vec<f32>,
    bias: Option<Vec<f32>>,
}

#[derive(Deserialize)]
struct Samplers {
    distributed: Vec<Distributed>,
    loader: Vec<Loader>,
}

#[derive(Deserialize)]
struct Distributed {
    dataset_len: usize,
    num_replicas: usize,
    shuffle: bool,
    drop_last: bool,
    seed: u64,
    epoch: u64,
    ranks: Vec<Vec<usize>>,
}

#[derive(Deserialize)]
struct Loader {
    seed: u64,
    dataset_len: usize,
    randn_before: usize,
    randn_between: usize,
    epochs: Vec<Vec<usize>>,
}

fn fixture<T: serde::de::DeserializeOwned>(name: &str) -> T {
    let path = format!("{}/tests/fixtures/{name}", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"));
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{path}: {error}"))
}

fn bits(numbers: &[f32]) -> Vec<u32> {
    numbers.iter().map(|number| number.to_bits()).collect()
}

#[test]
fn random_numbers() {
    for case in fixture::<Cases<RandomCase>>("random.json").cases {
        let mut generator = Generator::new(case.seed);
        for (number, call) in case.calls.iter().enumerate() {
            let at = format!("seed {}, call {number}: {} {:?}", case.seed, call.op, call.args);
            let wanted: Vec<f32> = call.out.iter().map(|&number| number as f32).collect();
            let reals = |got: Vec<f32>| assert_eq!(bits(&got), bits(&wanted), "{at}");
            let integers = |got: Vec<f64>| assert_eq!(got, call.out, "{at}");
            match (call.op.as_str(), call.args.as_slice()) {
                ("rand", &[len]) => reals(generator.rand(len as usize).unwrap()),
                ("randn", &[len]) => reals(generator.randn(len as usize).unwrap()),
                ("uniform", &[low, high, len]) => reals(generator.uniform(len as usize, low, high).unwrap()),
                ("normal", &[mean, deviation, len]) => {
                    reals(generator.normal(len as usize, mean, deviation).unwrap());
                }
                ("randperm", &[len]) => {
                    integers(generator.randperm(len as usize).unwrap().iter().map(|&i| i as f64).collect());
                }
                ("randint", &[low, high, len]) => {
                    let numbers = generator.randint(len as usize, low as i64, high as i64).unwrap();
                    integers(numbers.iter().map(|&i| i as f64).collect());
                }
                _ => panic!("{at}: no such call"),
            }
        }
    }
}

#[test]
fn initial_values() {
    for case in fixture::<Cases<InitialCase>>("initial_values.json").cases {
        let mut generator = Generator::new(case.seed);
        for layer in &case.layers {
            let at = format!("{} {:?}", layer.layer, layer.args);
            let (weight, bias) = match (layer.layer.as_str(), layer.args.as_slice()) {
                ("linear", &[inputs, outputs, 1]) => {
                    let made = initial::linear(&mut generator, inputs, outputs).unwrap();
                    (made.weight, Some(made.bias))
                }
                ("linear", &[inputs, outputs, 0]) => {
                    (initial::linear_weight(&mut generator, inputs, outputs).unwrap(), None)
                }
                ("conv2d", &[inputs, outputs, height, width, groups]) => {
                    let made =
                        initial::conv2d(&mut generator, inputs, outputs, (height, width), groups).unwrap();
                    (made.weight, Some(made.bias))
                }
                ("embedding", &[count, dim]) => {
                    (initial::embedding(&mut generator, count, dim).unwrap(), None)
                }
                _ => panic!("{at}: no such layer"),
            };
            assert_eq!(bits(&weight), bits(&layer.weight), "{at}: weight");
            assert_eq!(bias.as_deref().map(bits), layer.bias.as_deref().map(bits), "{at}: bias");
        }
    }
}

#[test]
fn distributed_orders() {
    for case in fixture::<Samplers>("samplers.json").distributed {
        let Distributed { dataset_len, num_replicas, shuffle, drop_last, seed, epoch, ranks } = case;
        for (rank, wanted) in ranks.iter().enumerate() {
            let tail = if drop_last { Tail::Drop } else { Tail::Pad };
            let config = DistributedSamplerConfig { dataset_len, num_replicas, rank, shuffle, seed, tail };
            let mut sampler = DistributedSampler::new(config.clone()).unwrap();
            sampler.set_epoch(epoch);
            assert_eq!(sampler.len(), wanted.len(), "{config:?}, epoch {epoch}");
            assert_eq!(&sampler.indices().unwrap().collect::<Vec<_>>(), wanted, "{config:?}, epoch {epoch}");
        }
    }
}

#[test]
fn shuffling_loader_orders() {
    for case in fixture::<Samplers>("samplers.json").loader {
        let global = SharedGenerator::from(Generator::new(case.seed));
        global.with(|generator| generator.randn(case.randn_before).unwrap());
        let mut sampler = RandomSampler::new(case.dataset_len, global.clone());
        for (epoch, wanted) in case.epochs.iter().enumerate() {
            let order: Vec<_> = sampler.indices().unwrap().collect();
            assert_eq!(&order, wanted, "seed {}, epoch {epoch}", case.seed);
            global.with(|generator| generator.randn(case.randn_between).unwrap());
        }
    }
}
