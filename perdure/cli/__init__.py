from perdure.base.standard_streams import open_closed_streams, print_any_character

# Before any module of the command looks at its streams or opens a file.
open_closed_streams()
print_any_character()
