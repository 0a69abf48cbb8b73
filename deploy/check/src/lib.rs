//! Checks the Kubernetes manifests next to this folder against their schemas: each is read into the types that are
//! generated from the schemas, and written again, to find fields that are misspelt, misplaced or of another type.
#![cfg(test)]

use std::path::Path;

use k8s_openapi::api::core::v1::{PersistentVolumeClaim, PodTemplateSpec, Secret, Service};
use kcr_jobset_x_k8s_io::v1alpha2::jobsets::JobSet;
use serde::Serialize;
use serde::de::{Deserialize, DeserializeOwned};
use serde_json::Value;

/// Returns the documents of a YAML file.
fn documents(name: &str) -> Vec<Value> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../kubernetes").join(name);
    let text = std::fs::read_to_string(path).unwrap();
    serde_yaml_ng::Deserializer::from_str(&text)
        .map(|document| Value::deserialize(document).unwrap())
        .collect()
}

/// Returns the only document of a kind.
fn of_kind(name: &str, kind: &str) -> Value {
    let mut found = documents(name).into_iter().filter(|document| document["kind"] == kind);
    let document = found.next().unwrap_or_else(|| panic!("{name} has no {kind}"));
    assert!(found.next().is_none(), "{name} has two of {kind}");
    document
}

/// Reads a document into its type, and panics if any field is lost.
fn checked<T: DeserializeOwned + Serialize>(document: &Value) -> T {
    let typed: T = serde_json::from_value(document.clone()).unwrap();
    if let Err(place) = contained(document, &serde_json::to_value(&typed).unwrap()) {
        panic!("{}: the schema has no {place}", document["kind"]);
    }
    typed
}

/// Checks that all of `part` is in `whole`; the error is the path of what is not.
fn contained(part: &Value, whole: &Value) -> Result<(), String> {
    let below = |name: &str, place: String| {
        if place.is_empty() { name.to_string() } else { format!("{name}.{place}") }
    };
    match (part, whole) {
        (Value::Object(part), Value::Object(whole)) => part.iter().try_for_each(|(name, value)| {
            let other = whole.get(name).ok_or_else(|| name.clone())?;
            contained(value, other).map_err(|place| below(name, place))
        }),
        (Value::Array(part), Value::Array(whole)) if part.len() == whole.len() => {
            let pairs = part.iter().zip(whole).enumerate();
            pairs.into_iter().try_for_each(|(at, (part, whole))| {
                contained(part, whole).map_err(|place| below(&at.to_string(), place))
            })
        }
        _ if part == whole => Ok(()),
        _ => Err(format!("{part} (it reads {whole})")),
    }
}

const FILE: &str = "jobset.yaml";

#[test]
fn every_document_is_of_its_schema() {
    checked::<JobSet>(&of_kind(FILE, "JobSet"));
    checked::<Service>(&of_kind(FILE, "Service"));
    checked::<PersistentVolumeClaim>(&of_kind(FILE, "PersistentVolumeClaim"));
    checked::<Secret>(&of_kind("secret.yaml", "Secret"));
    assert_eq!((documents(FILE).len(), documents("secret.yaml").len()), (3, 1));
    // The JobSet's schema has its own definition of the pod; this type is Kubernetes' own.
    checked::<PodTemplateSpec>(
        &of_kind(FILE, "JobSet")["spec"]["replicatedJobs"][0]["template"]["spec"]["template"],
    );
}

#[test]
fn a_misspelt_field_would_be_found() {
    for (pointer, name) in
        [("/spec", "failurPolicy"), ("/spec/replicatedJobs/0/template/spec/template/spec", "volume")]
    {
        let mut document = of_kind(FILE, "JobSet");
        document.pointer_mut(pointer).unwrap()[name] = serde_json::json!({});
        let typed: JobSet = serde_json::from_value(document.clone()).unwrap();
        let place = contained(&document, &serde_json::to_value(typed).unwrap()).unwrap_err();
        assert!(place.ends_with(name), "{place}");
    }
    let mut document = of_kind(FILE, "JobSet");
    document["spec"]["replicatedJobs"][0]["replicas"] = "one".into();
    assert!(serde_json::from_value::<JobSet>(document).is_err());
}

fn pod() -> Value {
    of_kind(FILE, "JobSet")["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"].clone()
}

fn variable(name: &str) -> Value {
    let variables = pod()["containers"][0]["env"].as_array().unwrap().clone();
    variables.into_iter().find(|variable| variable["name"] == name).unwrap_or_else(|| panic!("no {name}"))
}

#[test]
fn names_fit_together() {
    let (jobset, service, secret) =
        (of_kind(FILE, "JobSet"), of_kind(FILE, "Service"), of_kind("secret.yaml", "Secret"));
    let [name, subdomain, key] = [
        &jobset["metadata"]["name"],
        &jobset["spec"]["network"]["subdomain"],
        &variable("GIRANDOLE_SECRET")["valueFrom"]["secretKeyRef"]["key"],
    ]
    .map(|value| value.as_str().unwrap().to_string());
    assert_eq!(service["metadata"]["name"], subdomain.as_str());
    assert_eq!(service["spec"]["clusterIP"], "None");
    assert_eq!(service["spec"]["selector"]["jobset.sigs.k8s.io/jobset-name"], name.as_str());
    let job = &jobset["spec"]["replicatedJobs"][0];
    let first = format!("{name}-{}-0-0.{subdomain}", job["name"].as_str().unwrap());
    assert_eq!(variable("PET_MASTER_ADDR")["value"], first.as_str());
    let pods = job["template"]["spec"]["completions"].as_u64().unwrap();
    assert_eq!(job["template"]["spec"]["parallelism"], pods);
    assert_eq!(variable("PET_NNODES")["value"], pods.to_string().as_str());
    assert_eq!(variable("GIRANDOLE_SECRET")["valueFrom"]["secretKeyRef"]["name"], secret["metadata"]["name"]);
    assert!(secret["stringData"][key.as_str()].is_string());
    let claim = &of_kind(FILE, "PersistentVolumeClaim")["metadata"]["name"];
    let volumes = pod()["volumes"].as_array().unwrap().clone();
    assert!(volumes.iter().any(|volume| volume["persistentVolumeClaim"]["claimName"] == *claim));
    for mount in pod()["containers"][0]["volumeMounts"].as_array().unwrap() {
        assert!(volumes.iter().any(|volume| volume["name"] == mount["name"]), "{mount}");
    }
}

#[test]
fn no_secret_is_written_down() {
    assert!(variable("GIRANDOLE_SECRET").get("value").is_none());
    // The placeholder must not be a valid secret, so that programs refuse it.
    let text = of_kind("secret.yaml", "Secret")["stringData"]["secret"].as_str().unwrap().to_string();
    assert!(text.len() != 64 && text.contains(|c: char| !c.is_ascii_hexdigit()));
}
