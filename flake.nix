{
  description = "Pallas kernels for Google TPUs as PyTorch ops, for the Hugging Face Kernels Hub";

  inputs = {
    kernel-builder.url = "github:huggingface/kernels";
    nixpkgs.follows = "kernel-builder/nixpkgs";
  };

  outputs =
    {
      self,
      kernel-builder,
      nixpkgs,
    }:
    let
      inherit (nixpkgs) lib;
      systems = [
        "x86_64-linux"
        "aarch64-linux"
      ];
      eachSystem = make: lib.genAttrs systems (system: make system nixpkgs.legacyPackages.${system});

      # scripts/build.py needs Python's standard library and nothing else.
      runBuild =
        pkgs: name: arguments:
        pkgs.runCommand name { nativeBuildInputs = [ pkgs.python312 ]; } ''
          python3 ${self}/scripts/build.py ${arguments} "$out"
        '';
    in
    {
      packages = eachSystem (
        system: pkgs: rec {
          # What `make build` writes, without the commit: the sandbox has no git.
          variants = runBuild pkgs "tpu-kernels-variants" "--out";

          # One kernel-builder project per kernel. Each has a flake of its own, whose outputs are
          # those of kernel-builder: copy one into a git repository and run `nix build .#bundle`.
          projects = runBuild pkgs "tpu-kernels-projects" "--emit-projects";

          default = variants;
        }
      );

      devShells = eachSystem (
        system: pkgs: {
          default = pkgs.mkShell {
            packages = [
              kernel-builder.packages.${system}.kernel-builder
              pkgs.cosign
              pkgs.git
              pkgs.gnumake
              pkgs.python312
              pkgs.uv
            ];
          };
        }
      );
    };
}
