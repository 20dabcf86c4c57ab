"""The ktconvert command as `python -m ktconvert`."""

if __name__ == "__main__":  # processes of multiprocessing import this module, too
    try:
        from ktconvert.pipeline.program import main

        main()
    except KeyboardInterrupt:  # during the import of the program, which handles all later ones
        raise SystemExit(130) from None
